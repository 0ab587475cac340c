"""A file of JSON lines, each with a step, that a resumed run goes on writing.

Does not decide what a line holds.
"""

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

logger = logging.getLogger(__name__)


def open_for_resume(path: Path, resume_step: int, *, every_step: bool) -> TextIO:
    """Keep the lines up to the resumed step, drop later ones and a torn last line, and append.

    The file is replaced in one move, so that a kill leaves the old lines or the new ones.

    Args:
        path: the file; made if missing.
        resume_step: last step that is kept; 0 for a new run.
        every_step: each step has a line; one warning says if any is missing.

    Returns:
        The file, open at its end; the caller closes it.

    Raises:
        OSError: if it cannot be written.
    """
    kept: list[str] = []
    missing = set(range(1, resume_step + 1)) if every_step else set()
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                step = json.loads(line)["step"]
                is_kept = step <= resume_step
            except (ValueError, KeyError, TypeError):
                logger.warning("dropping a damaged line of %s", path)
                continue
            if is_kept:
                kept.append(line + "\n")
                missing.discard(step)
    if missing:
        logger.warning(
            "%s lacks %d of the %d steps so far, step %d the first; reports will lack them too",
            path,
            len(missing),
            resume_step,
            min(missing),
        )
    rewritten = path.with_suffix(".tmp")
    rewritten.write_text("".join(kept), encoding="utf-8")
    os.replace(rewritten, path)
    return path.open("a", encoding="utf-8")


class JsonLines:
    """A file of JSON lines, one or more per step. One per process; only rank 0 writes."""

    def __init__(
        self, path: Path, *, rank: int, resume_step: int = 0, every_step: bool = False
    ) -> None:
        """Open the file on rank 0; what it holds of steps after `resume_step` is dropped.

        Args:
            path: the file; its folder is made if missing.
            rank: this process's global rank.
            resume_step: last step that is kept from an earlier process; 0 for a new run.
            every_step: see `open_for_resume`.

        Raises:
            OSError: if it cannot be written.
        """
        self._file: TextIO | None = None
        if rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_for_resume(path, resume_step, every_step=every_step)

    def append(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Append the lines of a step and flush them.

        Args:
            step: the iteration's step, put into every line.
            records: JSON values of each line, finite.

        Raises:
            ValueError: if a value is not finite.
        """
        if self._file is None:
            return
        lines = [json.dumps({"step": step, **one}, allow_nan=False) + "\n" for one in records]
        self._file.write("".join(lines))
        self._file.flush()

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._file is not None:
            self._file.close()
        self._file = None


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
