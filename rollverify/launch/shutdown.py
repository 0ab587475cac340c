"""How one rank ends: on request within a bounded time, with its parent, or with an error report."""

import contextlib
import ctypes
import errno
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from rollverify.errors import ConfigError, UserError, exit_code

logger = logging.getLogger(__name__)

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""What the operating system says where nothing can be written any more."""

ERROR_DIR_VARIABLE = "ROLLVERIFY_ERROR_DIR"
"""Environment variable: folder that takes one report per failed rank; the launcher sets it."""

STOP_GRACE_VARIABLE = "ROLLVERIFY_STOP_GRACE_S"
"""Environment variable: seconds from Ctrl-C to the end of every process, default 10."""

BEFORE_ALL = 0.0
"""Time of a report that is the first cause, whatever others say earlier."""

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


@dataclass(kw_only=True, slots=True, frozen=True)
class RankError:
    """Why one rank ended."""

    rank: int
    time: float
    """Seconds since the epoch when the error reached the rank's main function; orders causes."""
    kind: Literal["user", "internal"]
    """"user": the user can cure it, the message says how; "internal": everything else."""
    message: str
    """One line; for internal errors it starts with the exception's type."""
    traceback: str
    """Full traceback, several lines; empty if the rank could not write one itself."""


def stop_grace_s() -> float:
    """Seconds that a run may take to end after the first signal; only a value > 0 counts."""
    try:
        seconds = float(os.environ.get(STOP_GRACE_VARIABLE, ""))
    except ValueError:
        seconds = 0.0
    return seconds if seconds > 0 else 10.0


def die_with_parent() -> None:
    """Have the kernel (Linux) SIGKILL this process when its parent ends, however that ends.

    Children do not inherit it: every process that the project starts calls it first thing.
    """
    if _LIBC is None:
        return
    parent = os.getppid()
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # the parent ended between the two lines; no signal will come
        os._exit(128 + signal.SIGKILL)


def mark(what: Literal["begun", "ended"]) -> None:
    """Tell the launcher how far this rank is: one that leaves with code 0 on its way has failed."""
    folder = os.environ.get(ERROR_DIR_VARIABLE)
    if folder:
        with contextlib.suppress(OSError):
            Path(folder, f"{what}-{os.environ.get('RANK', '0')}").touch()


def left_early(folder: Path) -> list[int]:
    """Ranks that have begun and not ended, by their marks."""
    begun, ended = (
        {int(file.name.rpartition("-")[2]) for file in folder.glob(f"{what}-*")}
        for what in ("begun", "ended")
    )
    return sorted(begun - ended)


def exit_at_once(code: int) -> None:
    """End without the interpreter's teardown, in which native libraries print leak reports."""
    mark("ended")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def write_rank_error(error: BaseException) -> int:
    """Report what ends this rank, and return its exit code: 2 for user errors, otherwise 1.

    Under the launcher this writes one file, which the launcher prints; a first report of a rank is
    kept. Without a launcher it prints to stderr: the message for user errors, else the traceback.
    """
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        error = ConfigError(f"{error}; free space or choose another run.output_dir")
    is_user = isinstance(error, UserError)
    text = " ".join(str(error).split())
    report = RankError(
        rank=int(os.environ.get("RANK", "0")),
        time=time.time(),
        kind="user" if is_user else "internal",
        message=text if is_user else f"{type(error).__name__}: {text}".rstrip(": "),
        traceback="".join(traceback.format_exception(error)),
    )
    folder = os.environ.get(ERROR_DIR_VARIABLE)
    if not folder or not save_rank_error(report, Path(folder)):
        print(f"error: {text}" if is_user else report.traceback, file=sys.stderr, flush=True)
    return exit_code(error)


def save_rank_error(report: RankError, folder: Path) -> bool:
    """Write a rank's first report, whole or not at all; False if the folder cannot be written."""
    file = folder / f"rank-{report.rank}.json"
    draft = folder / f".rank-{report.rank}.{os.getpid()}"
    try:
        if not file.exists():
            draft.write_text(json.dumps(asdict(report)), encoding="utf-8")
            draft.rename(file)
    except OSError:
        return False
    return True


def read_rank_errors(folder: Path) -> list[RankError]:
    """All reports in the folder, the first cause first."""
    files = folder.glob("rank-*.json")
    reports = [RankError(**json.loads(file.read_text(encoding="utf-8"))) for file in files]
    return sorted(reports, key=lambda report: (report.time, report.rank))


class StopRequest:
    """Turns SIGINT and SIGTERM into flags that the training loop reads.

    The first signal sets `requested`, which is read between steps, and starts a timer. At half of
    the time `is_urgent` says that a rollout or an evaluation must be left on its way; if `done` is
    not called in time, the process ends with exit code 128 + signal. A second signal ends it at
    once. A thread of its own reads the signals, because Python's handlers wait while the main
    thread is inside a collective or a kernel. Create it in the main thread, one per process, after
    vLLM and torch are set up.
    """

    def __init__(self, *, limit_s: float | None = None) -> None:
        """Install the handlers; a step has limit_s, by default 0.8 of the launcher's patience."""
        self.limit_s = 0.8 * stop_grace_s() if limit_s is None else limit_s
        self.signal_number: int | None = None
        """The first signal, or None."""
        self.is_urgent = False
        """Whether what takes long is left on its way: the step will not end in time."""
        self._is_of_others = False
        self._is_done = threading.Event()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        # The interpreter's C handler writes each signal's number here, even if Python code waits.
        self._old_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old_handlers = {
            number: signal.signal(number, _leave_to_thread)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        # A signal to a child that is just being forked must neither reach us nor get lost.
        self._masks = threading.local()
        os.register_at_fork(
            before=self._hold_signals,
            after_in_parent=self._release_signals,
            after_in_child=self._forget_in_child,
        )
        threading.Thread(target=self._read_signals, name="stop-request", daemon=True).start()

    @property
    def requested(self) -> bool:
        """True once a signal has come."""
        return self.signal_number is not None

    @property
    def exit_code(self) -> int:
        """Exit code of a run that was asked to stop: 128 + signal; 0 if it was not asked."""
        return 0 if self.signal_number is None else 128 + self.signal_number

    def done(self) -> None:
        """The step has ended and what was asked for is saved: the timer no longer ends us."""
        self._is_done.set()

    def close(self) -> None:
        """Put the earlier handlers back. Main thread only."""
        self.done()
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._old_handlers = {}
        self._writer.close()

    def _read_signals(self) -> None:
        while received := self._reader.recv(1):
            number = received[0]
            if number not in (signal.SIGINT, signal.SIGTERM):
                continue
            if self.signal_number is not None and not self._is_of_others:
                os._exit(128 + number)
            self._is_of_others = False
            self.take(number)

    def take(self, number: int, *, of_others: bool = False) -> None:
        """Stop as a signal asks for, once; `of_others`: it reached another rank."""
        if self.signal_number is not None:
            return
        self.signal_number, self._is_of_others = number, of_others
        # The timer first: logging takes locks that a stuck main thread may hold.
        threading.Thread(target=self._end_late, name="stop-timer", daemon=True).start()
        logger.info("finishing this step; press Ctrl-C again to stop now")

    def _end_late(self) -> None:
        if not self._is_done.wait(self.limit_s / 2):
            self.is_urgent = True
            if not self._is_done.wait(self.limit_s / 2):
                os._exit(self.exit_code)

    def _hold_signals(self) -> None:
        held = (signal.SIGINT, signal.SIGTERM)
        self._masks.old = signal.pthread_sigmask(signal.SIG_BLOCK, held)

    def _release_signals(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.old)

    def _forget_in_child(self) -> None:
        """A forked child has no reader thread, and its signals are not the parent's."""
        if self._old_handlers:
            signal.set_wakeup_fd(-1)
            for number in self._old_handlers:
                signal.signal(number, signal.SIG_DFL)
        self._release_signals()


def _leave_to_thread(_signal: int, _frame: FrameType | None) -> None:
    """A Python-level handler must exist, or the signal would end the process."""
