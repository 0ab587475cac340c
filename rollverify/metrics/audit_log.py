"""The audit log: one JSON line per cut of an unfinished trajectory, in `cuts.jsonl`.

Gathers nothing: it writes what it is given, on rank 0 only.

Example line: {"step": 3, "policy_version": 3, "group_id": 41, "sample_index": 2, "rule": "token",
"index": 17, "ops": 2.3, "kept_tokens": 17, "cut_tokens": 5, "cut_versions": [1, 2]}: verified
against version 3, response token 17 had OPS 2.3, so it and the 4 after it are gone. For the rule
"segment", "ops" is the mean over the segment that begins at "index".
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rollverify.metrics.json_lines import open_for_resume

CUTS_FILE = "cuts.jsonl"


class AuditLog:
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
            self._file = open_for_resume(folder / CUTS_FILE, resume_step)

    def write(self, step: int, cuts: Sequence[Mapping[str, Any]]) -> None:
        """Append the cuts of a step and flush them.

        Args:
            step: the iteration's step, put into every line.
            cuts: JSON values of each cut, finite.

        Raises:
            ValueError: if a value is not finite.
        """
        if self._file is None:
            return
        lines = [json.dumps({"step": step, **cut}, allow_nan=False) + "\n" for cut in cuts]
        self._file.write("".join(lines))
        self._file.flush()

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._file is not None:
            self._file.close()
        self._file = None
