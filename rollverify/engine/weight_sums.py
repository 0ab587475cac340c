"""Proof that every weight arrived: sums of bit patterns, sent against held.

Integer sums do not depend on the order of what is added, so fused and stacked parameters hold the
sum of their parts, and no kernel's rearrangement changes it; padding with zeros adds nothing. One
flipped bit always changes the sum.
"""

import re
from collections.abc import Callable, Container, Mapping

import torch
from torch import Tensor

from rollverify.errors import WeightSyncError

CHUNK = 2**24
"""Values that are widened to 64 bits at a time."""

FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""vLLM's name of the module that holds a projection of a Hugging Face model among others."""

_EXPERT = re.compile(r"(?P<layer>.+\.experts)\.(?P<expert>\d+)\.(?P<projection>\w+)\.weight")
_STACKED = re.compile(r"(?P<layer>.+\.experts)\.(?P<projection>\w+_proj)(\.weight)?")
_EXPERT_PARAMETER = {"gate_proj": "w13_weight", "up_proj": "w13_weight", "down_proj": "w2_weight"}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_sum(tensor: Tensor) -> Tensor:
    """Sum of a tensor's bit patterns as signed integers, modulo 2^64; int64 scalar, its device."""
    bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()]).flatten()
    parts = [part.sum(dtype=torch.int64) for part in bits.split(CHUNK)]
    return torch.stack(parts).sum() if parts else bits.new_zeros((), dtype=torch.int64)


def engine_name(name: str, own: Container[str]) -> str | None:
    """The engine's parameter that holds a weight with this Hugging Face name; None: no one does.

    `own` are the engine's parameter names.
    """
    if name in own:
        return name
    match = _EXPERT.fullmatch(name) or _STACKED.fullmatch(name)
    if match and match["projection"] in _EXPERT_PARAMETER:
        leaf = _EXPERT_PARAMETER[match["projection"]]
        layer = match["layer"]
        candidates = [f"{layer}.routed_experts.{leaf}", f"{layer}.{leaf}"]
        return next((one for one in candidates if one in own), None)
    parts = [FUSED.get(part, part) for part in name.split(".")]
    fused = ".".join(parts)
    return fused if fused in own else None


class WeightSums:
    """Adds up what is sent during one transfer and compares it with what the engine holds."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        own_part: Callable[[str, str, Tensor], Tensor] | None = None,
    ) -> None:
        """`parameters`: the engine's own, by its names.

        `own_part` gives what a member of a shared engine holds of a weight, see `vllm_shared`.
        """
        self._parameters = dict(parameters)
        self._own_part = own_part
        self._sent: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Count a weight that is about to be loaded, by its Hugging Face name."""
        own = engine_name(name, self._parameters)
        if own is None:
            return  # The engine's loader knows what to do with it, or refuses it.
        if self._own_part is not None:
            tensor = self._own_part(own, name, tensor)
        total = bit_sum(tensor.to(self._parameters[own].dtype))
        before = self._sent.get(own)
        self._sent[own] = total if before is None else before + total

    @property
    def names(self) -> set[str]:
        """The engine's parameters of which a part was sent."""
        return set(self._sent)

    def check(self) -> None:
        """Compare; a WeightSyncError names the parameters that differ.

        Those that got no weight at all are left to the check of names.
        """
        names = list(self._sent)
        held = [bit_sum(self._parameters[name]) for name in names]  # queued before any is read
        sent = [self._sent[name] for name in names]
        wrong = [n for n, a, b in zip(names, held, sent, strict=True) if a.item() != b.item()]
        if wrong:
            raise WeightSyncError(
                f"{len(wrong)} of {len(names)} engine parameters do not hold what was sent: "
                f"{', '.join(wrong[:3])}; a part of them was not sent, or was changed on its way"
            )
