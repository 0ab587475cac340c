"""The slot log: one JSON line per rollout phase, in `slots.jsonl`.

Gathers nothing: it writes what it is given, on rank 0 only.

Example line: {"step": 3, "active": [8, 8, 7, 3], "lengths": [2, 4, 4, 3]}: the phase of step 3 took
four engine steps, in which 8, 8, 7 and 3 requests ran over all ranks, and the four responses that
the step trains on have these lengths in tokens, over all their segments.
"""

from collections.abc import Sequence
from pathlib import Path

from rollverify.metrics.json_lines import JsonLines

SLOTS_FILE = "slots.jsonl"


class SlotLog:
    """One per process, made after the run's folder; every rank calls the same methods."""

    def __init__(self, folder: Path, *, rank: int, resume_step: int = 0) -> None:
        """Open the file in the run's folder, see `JsonLines`."""
        self._lines = JsonLines(
            folder / SLOTS_FILE, rank=rank, resume_step=resume_step, every_step=True
        )

    def write(self, step: int, active: Sequence[int], lengths: Sequence[int]) -> None:
        """Append the line of a step and flush it.

        Args:
            step: the iteration's step.
            active: running requests of each engine step.
            lengths: tokens of each response that the step trains on.
        """
        self._lines.append(step, [{"active": list(active), "lengths": list(lengths)}])

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._lines.close()
