"""One row of documents laid end to end: as the trainer is given it and as the model takes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


class Row(Protocol):
    """What a forward pass reads of a packed row; see `PackedRow`."""

    @property
    def tokens(self) -> Tensor:
        """[T] int64."""
        ...

    @property
    def positions(self) -> Tensor:
        """[T] int64."""
        ...

    @property
    def targets(self) -> Tensor:
        """[T] int64."""
        ...

    @property
    def routed_experts(self) -> Tensor | None:
        """[T, L, K] integers; None leaves the choice to the routers."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRow:
    """Documents laid end to end in one row; one forward pass.

    Example: documents [5, 6, 7] and [8, 9], scored from their second token on, give
    tokens [5, 6, 8], positions [0, 1, 0], targets [6, 7, 9].
    """

    tokens: Tensor
    """[T] int64; each document without its last token."""

    positions: Tensor
    """[T] int64; restarts at 0 at each document."""

    targets: Tensor
    """[T] int64; the token that follows."""

    routed_experts: Tensor | None = None
    """[T, L, K] expert ids to replay, for all L layers; None is the routers' own choice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowInputs:
    """One packed row, ready for the model."""

    tokens: Tensor
    """[1, T] int64."""

    targets: Tensor
    """[1, T] int64."""

    context: Mapping[str, Any]
    """Positions and document boundaries, as keywords of the model's forward."""
