"""Keeps the optimizer's state in main memory but for the optimizer's own step.

Between two steps the state is twice as large as the weights and of no use: a rollout engine, or the
activations of a longer row, can have its place on the GPU.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class OptimizerOffload:
    """Moves the state of some optimizers between a device and main memory."""

    def __init__(self, optimizers: Iterable[Optimizer], device: torch.device) -> None:
        """`device`: of the parameters; if that is the CPU nothing is ever moved."""
        self._optimizers = list(optimizers)
        self._device = device

    def to_host(self) -> None:
        """Move the state to main memory; what is there stays."""
        self._move(torch.device("cpu"))

    def to_device(self) -> None:
        """Move the state back, for a step."""
        self._move(self._device)

    def _move(self, device: torch.device) -> None:
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.ndim:  # the count of steps stays
                        state[name] = moved(value, device)


def moved(value: Tensor, device: torch.device) -> Tensor:
    """The tensor, or a DTensor's part on this rank, on another device; itself if it is there.

    A DTensor keeps its mesh, so that a checkpoint can be written from main memory.
    """
    local = value.to_local() if isinstance(value, DTensor) else value
    if local.device == device:
        return value
    pin = device.type == "cpu" and torch.cuda.is_available()
    other = torch.empty_like(local, device=device, pin_memory=pin)
    other.copy_(local, non_blocking=device.type != "cpu")
    if not isinstance(value, DTensor):
        return other
    return DTensor(other, value._spec, requires_grad=False)  # pyright: ignore[reportCallIssue]
