"""Files of JSON lines, each with a step, that a resumed run goes on writing."""

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from rollverify.files import write_atomic

logger = logging.getLogger(__name__)

CUTS_FILE = "cuts.jsonl"
SLOTS_FILE = "slots.jsonl"


class JsonLines:
    """A file of JSON lines, one or more per step; every rank calls, only rank 0 writes.

    Lines of steps after `resume_step` are dropped when it is opened. With `every_step`, one warning
    says if a step before has no line.
    """

    def __init__(
        self, path: Path, *, rank: int, resume_step: int = 0, every_step: bool = False
    ) -> None:
        """Open the file on rank 0, which makes its folder."""
        self._file: TextIO | None = None
        if rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = _kept_lines(path, resume_step, every_step=every_step)
            # One move, so that a kill leaves the old lines or the new ones.
            write_atomic(path, "".join(kept))
            self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Append the lines of a step and flush them; values must be finite."""
        if self._file is None:
            return
        lines = [json.dumps({"step": step, **record}, allow_nan=False) for record in records]
        self._file.write("".join(line + "\n" for line in lines))
        self._file.flush()

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._file is not None:
            self._file.close()
        self._file = None


class AuditLog(JsonLines):
    """The cuts of every step."""

    def __init__(self, folder: Path, *, rank: int, resume_step: int = 0) -> None:
        super().__init__(folder / CUTS_FILE, rank=rank, resume_step=resume_step)


class SlotLog(JsonLines):
    """A line per step: "active", running requests of each engine step; "lengths" of responses."""

    def __init__(self, folder: Path, *, rank: int, resume_step: int = 0) -> None:
        path = folder / SLOTS_FILE
        super().__init__(path, rank=rank, resume_step=resume_step, every_step=True)


def _kept_lines(path: Path, resume_step: int, *, every_step: bool) -> list[str]:
    """The lines up to the resumed step, without those that are damaged or torn."""
    kept: list[str] = []
    missing = set(range(1, resume_step + 1)) if every_step else set()
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.splitlines():
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
    return kept
