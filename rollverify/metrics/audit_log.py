"""The audit log: one JSON line per cut of an unfinished trajectory, in `cuts.jsonl`.

Gathers nothing: it writes what it is given, on rank 0 only.

Example line: {"step": 3, "policy_version": 3, "group_id": 41, "sample_index": 2, "rule": "token",
"index": 17, "ops": 2.3, "kept_tokens": 17, "cut_tokens": 5, "cut_versions": [1, 2]}: verified
against version 3, response token 17 had OPS 2.3, so it and the 4 after it are gone. For the rule
"segment", "ops" is the mean over the segment that begins at "index".
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollverify.metrics.json_lines import JsonLines

CUTS_FILE = "cuts.jsonl"


class AuditLog:
    """One per process, made after the run's folder; every rank calls the same methods."""

    def __init__(self, folder: Path, *, rank: int, resume_step: int = 0) -> None:
        """Open the file in the run's folder, see `JsonLines`."""
        self._lines = JsonLines(folder / CUTS_FILE, rank=rank, resume_step=resume_step)

    def write(self, step: int, cuts: Sequence[Mapping[str, Any]]) -> None:
        """Append the cuts of a step and flush them.

        Args:
            step: the iteration's step, put into every line.
            cuts: JSON values of each cut, finite.

        Raises:
            ValueError: if a value is not finite.
        """
        self._lines.append(step, cuts)

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._lines.close()
