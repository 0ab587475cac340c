"""A torchtitan `Trainer` that takes packed rows and a per-token loss instead of a data loader.

Gradients are summed over ranks, not averaged, so a loss must be divided by global counts.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.common.decoder import Decoder
from torchtitan.tools import utils
from torchtitan.trainer import Trainer

from torchtitan_ext.cpu.row_threads import RowThreads
from torchtitan_ext.no_data_loader import NoDataLoader, NoTokenizer
from torchtitan_ext.optimizer_offload import OptimizerOffload
from torchtitan_ext.packed_rows import Row
from torchtitan_ext.process_group import init_process_group
from torchtitan_ext.routing_replay import RoutingReplay, RoutingStats

TokenLoss = Callable[[int, Tensor, Tensor], Tensor]
"""(row index, log-probs [T], entropy [T]) -> scalar, already divided by global counts."""


def _with_own_storage(tensor: Tensor) -> Tensor:
    """A copy of a view into something larger: who keeps one expert shall not keep the layer."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


class PolicyTrainer(Trainer):
    """Updates and scores a policy."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's trainer settings without tokenizer and data loader."""

        tokenizer: NoTokenizer.Config = field(default_factory=NoTokenizer.Config)
        dataloader: NoDataLoader.Config = field(default_factory=NoDataLoader.Config)
        loss: CrossEntropyLoss.Config = field(default_factory=CrossEntropyLoss.Config)
        offload_optimizer: bool = False

    checkpointer: CheckpointManager  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._routing = RoutingReplay(self.model, self.device)
        self._offloads = config.offload_optimizer
        self._offload = OptimizerOffload(self.optimizers if self._offloads else (), self.device)
        self._row_threads = RowThreads(self.model, dtype=self.config.training.mixed_precision_param)

    def init_distributed(self) -> ParallelDims:
        """Join the process group unless the caller has, and lay out the dimensions. Collective."""
        _, world_size = init_process_group(self.config.comm.init_timeout_seconds)
        return ParallelDims.from_config(self.config.parallelism, world_size)

    @property
    def model(self) -> Decoder:
        """The sharded model; without pipeline parallelism there is one part."""
        model = self.model_parts[0]
        assert isinstance(model, Decoder)
        return model

    @property
    def rows_at_once(self) -> int:
        """Rows that `score` works on at the same time, all of which take memory."""
        return self._row_threads.rows_at_once

    @property
    def data_rank(self) -> int:
        """This rank's place among the ranks that hold different data."""
        mesh = self.parallel_dims.get_optional_mesh("batch")
        return 0 if mesh is None else mesh.get_local_rank()

    @property
    def data_world_size(self) -> int:
        """Number of ranks that hold different data."""
        mesh = self.parallel_dims.get_optional_mesh("batch")
        return 1 if mesh is None else mesh.size()

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The process group of those ranks; None where there is one."""
        mesh = self.parallel_dims.get_optional_mesh("batch")
        return None if mesh is None else mesh.get_group()

    @property
    def flops(self) -> tuple[int, int]:
        """Of forward and backward for a token: in matrices, in attention per token attended to."""
        count = self.model_config.get_nparams_and_flops
        matrices, with_one = (count(self.model, length)[1] for length in (0, 1))
        return matrices, with_one - matrices

    @property
    def peak_flops(self) -> float:
        """Of this GPU in bfloat16 per second, by its name."""
        return utils.get_peak_flops(utils.device_module.get_device_name(self.device))

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of this rank's optimizer state on the device between two steps; it comes later."""
        if self._offloads:
            return 0
        parts = (p.to_local() if isinstance(p, DTensor) else p for p in self.model.parameters())
        return 2 * sum(part.numel() * part.element_size() for part in parts)

    def _inputs(self, row: Row) -> dict[str, Any]:
        """Keywords of `ScoringDecoder.forward`."""
        positions = row.positions[None].to(self.device)
        return {
            "tokens": row.tokens[None].to(self.device),
            "positions": positions,
            "attention_masks": self.model.get_attention_masks(positions),
            "targets": row.targets[None].to(self.device),
        }

    def forward_backward(
        self, rows: Sequence[Row], token_loss: TokenLoss, *, temperature: float = 1.0
    ) -> Tensor:
        """This rank's share of the loss, scalar float32; gradients add up until `optimizer_step`.

        Collective: every data rank must pass the same number of rows. RoutingReplayError if the
        routing of a row does not fit it or the model.
        """
        total = torch.zeros((), device=self.device)
        model = self.model
        for index, row in enumerate(rows):
            if isinstance(model, FSDPModule):
                # Copies of the shards (HSDP) add up their gradients once, with the last row.
                model.set_requires_all_reduce(index + 1 == len(rows))
            with self.train_context(), self._replayed(row, watched=True):
                logprobs, entropy = model(**self._inputs(row), temperature=temperature)
                self._routing.count()
                loss = token_loss(index, logprobs, entropy)
                loss.backward()
            total += loss.detach()
            self.ntokens_seen += row.tokens.numel()
        return total

    def optimizer_step(self, *, is_last: bool = True) -> tuple[float, float]:
        """Step; gives the gradient norm before clipping and the learning rate used. Collective.

        Schedule and step count move on with the last step of an iteration only. FloatingPointError
        if the norm is not finite; parameters are left alone.
        """
        learning_rate = next(iter(self.lr_schedulers.get_metrics().values()))
        grad_norm = dist_utils.clip_grad_norm_(
            list(self.model.parameters()),
            self.config.training.max_norm,
            foreach=True,
            pp_mesh=None,
            ep_enabled=self.parallel_dims.ep_enabled,
        ).item()
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"gradient norm is {grad_norm} at step {self.step + 1}; lower training.lr or look "
                "at the loss inputs of this step"
            )
        self.checkpointer.maybe_wait_for_staging()
        self._offload.to_device()
        self.optimizers.step()
        self.optimizers.zero_grad()
        if is_last:
            self.offload_optimizer()
            self.lr_schedulers.step()
            self.step += 1
            self.gc_handler.run(self.step)
        return grad_norm, learning_rate

    def offload_optimizer(self) -> None:
        """Move the optimizer's state to main memory until its next step, if that is set."""
        self._offload.to_host()

    def score(self, rows: Sequence[Row], *, temperature: float = 1.0) -> list[Tensor]:
        """Log-probs of the rows' targets, [T] float32 nats on the CPU per row, routing replayed.

        Collective: every data rank must pass the same number of rows. RoutingReplayError as in
        `forward_backward`.
        """
        has_routing = any(row.routed_experts is not None for row in rows)
        if has_routing or len(rows) < 2 or self.rows_at_once < 2:
            return self._scored(rows, temperature, watched=False)[0]
        inputs = [self._inputs(row) for row in rows]
        return self._row_threads.score(inputs, temperature=temperature)

    def score_and_route(
        self, rows: Sequence[Row], *, temperature: float = 1.0
    ) -> tuple[list[Tensor], list[Tensor]]:
        """`score`, and [T, L, K] int16 experts that the routers choose by themselves, per row.

        On the CPU; 0 in layers without a router. RoutingReplayError for a dense model.
        """
        return self._scored(rows, temperature, watched=True)

    @torch.no_grad()
    def _scored(
        self, rows: Sequence[Row], temperature: float, *, watched: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        scores, routing = [], []
        for row in rows:
            with self.train_context(), self._replayed(row, watched=watched):
                inputs = self._inputs(row)
                logprobs, _ = self.model(**inputs, temperature=temperature, with_entropy=False)
                scores.append(logprobs.cpu())
                if watched:
                    routing.append(self._routing.own_choice())
        return scores, routing

    def _replayed(self, row: Row, *, watched: bool) -> AbstractContextManager[None]:
        return self._routing.replayed(row.routed_experts, row.tokens.numel(), watched=watched)

    def take_routing_stats(self) -> RoutingStats | None:
        """Routing of this rank's rows in `forward_backward` since the last call; None if dense."""
        return self._routing.take_stats()

    @torch.no_grad()
    def hf_parameters(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor on this rank's device), without tied ones. Collective.

        Every rank must exhaust it. Extra memory is one parameter; of stacked experts, one weight of
        all experts of a layer. Shards are cast to `dtype` before they are gathered.
        """
        spec = self.config.model_spec
        assert spec is not None and spec.state_dict_adapter is not None
        adapter = spec.state_dict_adapter(self.model_config, None)
        for name, value in self.model.state_dict().items():
            full = value = value if dtype is None else value.to(dtype)
            if isinstance(value, DTensor):  # With a single rank nothing has to be gathered.
                is_whole = value.device_mesh.size() == 1
                full = value.to_local() if is_whole else value.full_tensor()
            # Given a DTensor the adapter would name the experts of this rank only.
            parts = adapter.to_hf({name: full})
            del full
            for key in list(parts):
                yield key, _with_own_storage(parts.pop(key))
