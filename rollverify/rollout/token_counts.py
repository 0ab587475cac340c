"""What became of the tokens a rank has sampled. Counts only; `buffer.py` fills them."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class TokenCounts:
    """What became of the response tokens of this rank since the start of the run."""

    generated: int = 0
    """Sampled by the engine."""

    trained: int = 0
    """Handed to training."""

    cut: int = 0
    """Cut by verification."""

    discarded: int = 0
    """Thrown away by a filter; their sample starts again."""

    filtered: int = 0
    """Given up for good with their group."""

    dropped: int = 0
    """Given up at the switch to on-policy training."""

    @property
    def num_left(self) -> int:
        """Generated tokens that nothing has happened to yet."""
        thrown_away = self.cut + self.discarded + self.filtered + self.dropped
        return self.generated - self.trained - thrown_away
