"""The model the run started from, for a KL term: its weights wait on the CPU between passes.

For a scoring pass its shards are copied into the policy's parameters and those copied back
afterwards: two copies of this rank's shards in memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchtitan_ext.packed_rows import Row
from torchtitan_ext.policy_trainer import PolicyTrainer


class ReferencePolicy:
    """Scores rows under the weights of the folder the policy was made from."""

    def __init__(self, policy: PolicyTrainer) -> None:
        """Read the start weights; the policy keeps its own and lends its model. Collective."""
        self._policy = policy
        own = _copies(_shards(policy.model))
        folder = policy.config.hf_assets_path
        state = policy.model.state_dict()
        policy.checkpointer.dcp_load(state, folder, from_hf=True, from_quantized=False)
        self._weights = _copies(_shards(policy.model))
        self._put(own)

    @torch.no_grad()
    def score(self, rows: Sequence[Row], *, temperature: float) -> list[Tensor]:
        """Log-probs under the reference, as `PolicyTrainer.score`. Collective."""
        own = _copies(_shards(self._policy.model))
        self._put(self._weights)
        try:
            return self._policy.score(rows, temperature=temperature)
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, weights: list[Tensor]) -> None:
        for shard, weight in zip(_shards(self._policy.model), weights, strict=True):
            shard.copy_(weight)


def _shards(model: torch.nn.Module) -> list[Tensor]:
    """This rank's part of every parameter and saved buffer; writing to it writes the model.

    A scoring pass leaves the outermost module's parameters gathered: those would be no shards, and
    would still be used after the shards were written.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    tensors = [*model.parameters(), *model.buffers()]
    return [t.to_local() if isinstance(t, DTensor) else t.detach() for t in tensors]


def _copies(shards: list[Tensor]) -> list[Tensor]:
    return [shard.detach().to("cpu", copy=True) for shard in shards]
