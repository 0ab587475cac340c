"""Documents laid end to end in one row, as the trainer is given them."""

from dataclasses import dataclass
from typing import Protocol

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
    """One forward pass.

    Documents [5, 6, 7] and [8, 9], scored from their second token on, give tokens [5, 6, 8],
    positions [0, 1, 0], targets [6, 7, 9].
    """

    tokens: Tensor  # [T] int64; each document without its last token
    positions: Tensor  # [T] int64; restarts at 0 at each document
    targets: Tensor  # [T] int64; the token that follows
    routed_experts: Tensor | None = None  # [T, L, K] ids to replay; None: the routers' own choice
