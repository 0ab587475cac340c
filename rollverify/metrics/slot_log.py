"""The slot log: one JSON line per rollout phase, in `slots.jsonl`.

Gathers nothing: it writes what it is given, on rank 0 only.

Example line: {"step": 3, "active": [8, 8, 7, 3], "lengths": [2, 4, 4, 3]}: the phase of step 3 took
four engine steps, in which 8, 8, 7 and 3 requests ran over all ranks, and the four responses that
the step trains on have these lengths in tokens, over all their segments.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rollverify.metrics.json_lines import open_for_resume

SLOTS_FILE = "slots.jsonl"


class SlotLog:
    """One per process, made after the run's folder; every rank calls the same methods."""

    def __init__(self, folder: Path, *, rank: int, resume_step: int = 0) -> None:
        """Open the file on rank 0; what it holds of steps after `resume_step` is dropped.

        Args:
            folder: the run's folder; made if missing.
            rank: this process's global rank.
            resume_step: last step that is kept from an earlier process; 0 for a new run.

        Raises:
            OSError: if the folder cannot be written.
        """
        self._file: TextIO | None = None
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open_for_resume(folder / SLOTS_FILE, resume_step)

    def write(self, step: int, active: Sequence[int], lengths: Sequence[int]) -> None:
        """Append the line of a step and flush it.

        Args:
            step: the iteration's step.
            active: running requests of each engine step.
            lengths: tokens of each response that the step trains on.
        """
        if self._file is None:
            return
        line = {"step": step, "active": list(active), "lengths": list(lengths)}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._file is not None:
            self._file.close()
        self._file = None
