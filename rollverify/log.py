"""Standard-library logging for a run: one console line per event, on rank 0, beside a bar."""

import logging
import os
import sys
from typing import TextIO

from tqdm import tqdm

DEBUG_VARIABLE = "ROLLVERIFY_DEBUG"
"""Environment variable; if set and not empty, every logger on every rank speaks."""

_OWN_LOGGERS = ("rollverify", "torchtitan_ext", "__main__")
_LIBRARY_LOGGERS = ("torchtitan", "vllm", "transformers")


class ProgressSafeHandler(logging.StreamHandler[TextIO]):
    """Writes each record on lines of its own, even while a tqdm bar is drawn below."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream if stream is not None else sys.stderr)
        self._follows_stderr = stream is None

    def emit(self, record: logging.LogRecord) -> None:
        """Clear the bars, write the record, draw the bars again."""
        if self._follows_stderr:
            self.stream = sys.stderr
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


def init_logger(rank: int, world_size: int = 1, level: str = "INFO") -> None:
    """Set up console logging on stderr; calling it again replaces the earlier set-up.

    Rank 0 shows `level` and above, other ranks only warnings, libraries only errors; with
    ROLLVERIFY_DEBUG set, all ranks show our loggers from DEBUG and libraries from INFO on. Call it
    before vLLM is imported, whose own set-up VLLM_CONFIGURE_LOGGING then turns off.
    """
    levels = logging.getLevelNamesMapping()
    if level not in levels:
        raise ValueError(f"log level must be one of {', '.join(levels)}, got {level!r}")
    is_debug = bool(os.environ.get(DEBUG_VARIABLE))
    own_level = levels[level]
    if is_debug:
        own_level = logging.DEBUG
    elif rank != 0:
        own_level = max(own_level, logging.WARNING)
    library_level = logging.INFO if is_debug else logging.ERROR

    handler = ProgressSafeHandler()
    prefix = f"[rank {rank}] " if world_size > 1 else ""
    handler.setFormatter(_ConsoleFormatter(prefix))
    root = logging.getLogger()
    for old_handler in list(root.handlers):
        if isinstance(old_handler, ProgressSafeHandler):
            root.removeHandler(old_handler)
    root.addHandler(handler)
    # Some libraries log through the root logger itself, so its level is a library level.
    root.setLevel(library_level)
    for name in _LIBRARY_LOGGERS:
        logging.getLogger(name).setLevel(library_level)
    for name in _OWN_LOGGERS:
        logging.getLogger(name).setLevel(own_level)
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")


class _ConsoleFormatter(logging.Formatter):
    """`12:03:44 [rank 1] message`; the level from WARNING on, the logger's name for libraries."""

    def __init__(self, prefix: str) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._prefix = prefix

    def formatMessage(self, record: logging.LogRecord) -> str:
        origin = "" if record.name.split(".")[0] in _OWN_LOGGERS else f"{record.name}: "
        severity = f"{record.levelname} " if record.levelno != logging.INFO else ""
        time = self.formatTime(record, self.datefmt)
        return f"{time} {self._prefix}{severity}{origin}{record.message}"
