"""A file of JSON lines, each with a step, that a resumed run goes on writing.

Does not decide what a line holds, nor which rank writes.
"""

import json
import logging
import os
from pathlib import Path
from typing import TextIO

logger = logging.getLogger(__name__)


def open_for_resume(path: Path, resume_step: int) -> TextIO:
    """Keep the lines up to the resumed step, drop later ones and a torn last line, and append.

    The file is replaced in one move, so that a kill leaves the old lines or the new ones.

    Args:
        path: the file; made if missing.
        resume_step: last step that is kept; 0 for a new run.

    Returns:
        The file, open at its end; the caller closes it.

    Raises:
        OSError: if it cannot be written.
    """
    kept: list[str] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                is_kept = json.loads(line)["step"] <= resume_step
            except (ValueError, KeyError, TypeError):
                logger.warning("dropping a damaged line of %s", path)
                continue
            if is_kept:
                kept.append(line + "\n")
    rewritten = path.with_suffix(".tmp")
    rewritten.write_text("".join(kept), encoding="utf-8")
    os.replace(rewritten, path)
    return path.open("a", encoding="utf-8")
