"""Carries a plan out: starts what is missing, resumes what was interrupted, says how long it takes.

The runs themselves are ordinary runs of the ordinary launcher; nothing of them is decided here.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from rollverify.launch.shutdown import die_with_parent
from rollverify.metrics.recorder import METRICS_FILE
from rollverify.study.plan import PlannedRun
from rollverify.study.status import (
    Progress,
    RunStatus,
    read_lines,
    remaining_s,
    status_of,
    step_seconds,
)

LOG_FILE = "output.log"
LAUNCHER = (sys.executable, "-m", "rollverify.launch", "--nproc", "1", "--")
POLL_S = 1.0
SAY_EVERY_S = 60.0

Execute = Callable[[Sequence[str], Path, Callable[[], None]], int]
"""(command, log file, called every second) -> exit code, negative or above 128 for a signal."""

Say = Callable[[str], None]


def command_of(run: PlannedRun, status: RunStatus) -> list[str]:
    """What starts the run or goes on with it."""
    if status.progress is Progress.RESUMABLE:
        return [*LAUNCHER, "--resume", str(status.folder)]
    return [*LAUNCHER, *run.argv]


def plan_lines(runs: Sequence[PlannedRun], guess_minutes: float) -> list[str]:
    """The plan with what is done of it, and the time it needs.

    Args:
        runs: the plan.
        guess_minutes: minutes of a run, until runs have been measured.

    Raises:
        ConfigError: a run folder was made with other settings.
    """
    statuses = [status_of(run) for run in runs]
    step_s = step_seconds(runs, statuses, guess_minutes)
    left = [remaining_s(r, s, step_s[r.arm]) for r, s in zip(runs, statuses, strict=True)]
    lines = [
        f"{run.name}: {_words(status, run)}, {in_words(seconds)} left  [{run.place}]"
        for run, status, seconds in zip(runs, statuses, left, strict=True)
    ]
    is_measured = any(status.step_s is not None for status in statuses)
    basis = "measured in the runs so far" if is_measured else "guessed by the study file"
    return [*lines, f"all: {in_words(sum(left))} left ({basis})"]


def run_all(
    runs: Sequence[PlannedRun], guess_minutes: float, execute: Execute, say: Say
) -> tuple[int, list[str]]:
    """Carry out what is left of a plan; a run that fails does not stop the others.

    Args:
        runs: the plan.
        guess_minutes: minutes of a run, until runs have been measured.
        execute: runs a command.
        say: takes lines about the progress.

    Returns:
        (exit code of the signal that stopped the study or 0; the runs that failed, with reasons).

    Raises:
        ConfigError: a run folder was made with other settings; nothing is started then.
    """
    for run in runs:
        status_of(run)
    failed: list[str] = []
    for number, run in enumerate(runs, 1):
        status = status_of(run)
        title = f"[{number}/{len(runs)}] {run.name}"
        if status.progress is Progress.COMPLETE:
            say(f"{title}: complete already")
            continue
        say(f"{title}: {_words(status, run)}, starting")
        run.place.mkdir(parents=True, exist_ok=True)
        watch = _Watch(runs, run, guess_minutes, lambda text, title=title: say(f"{title}: {text}"))
        code = execute(command_of(run, status), run.place / LOG_FILE, watch)
        if code < 0 or code > 128:
            say(f"{title}: stopped; the same command goes on from here")
            return 128 - code if code < 0 else code, failed
        if code or status_of(run).progress is not Progress.COMPLETE:
            failed.append(f"{run.name} (exit code {code}, see {run.place / LOG_FILE})")
            say(f"{title}: failed with exit code {code}, see {run.place / LOG_FILE}")
        else:
            say(f"{title}: done; {_left(runs, guess_minutes)} left")
    return 0, failed


class _Watch:
    """Says now and then how far the running one is."""

    def __init__(
        self, runs: Sequence[PlannedRun], run: PlannedRun, guess_minutes: float, say: Say
    ) -> None:
        self._runs, self._run, self._guess_minutes, self._say = runs, run, guess_minutes, say
        self._next_s = time.monotonic() + SAY_EVERY_S

    def __call__(self) -> None:
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + SAY_EVERY_S
        files = sorted(self._run.place.glob(f"*/{METRICS_FILE}"), key=lambda f: f.stat().st_mtime)
        step = max((int(one["step"]) for one in read_lines(files[-1])), default=0) if files else 0
        total = self._run.config.training.steps
        self._say(f"step {step}/{total}; {_left(self._runs, self._guess_minutes)} left")


class LaunchedRun:
    """Runs commands one after the other; a signal to us reaches the run once and ends the study."""

    def __init__(self) -> None:
        """No signal has come."""
        self._signals: list[int] = []
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "LaunchedRun":
        """Take over the signals."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._old = {number: signal.signal(number, self._pass_on) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        """Give them back."""
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def __call__(self, command: Sequence[str], log: Path, watch: Callable[[], None]) -> int:
        """Run a command to its end; see `Execute`."""
        if self._signals:
            return 128 + self._signals[0]
        with log.open("ab") as output:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # a Ctrl-C reaches us, and we pass it on, once
                preexec_fn=die_with_parent,
            )
        while True:
            try:
                code = self._child.wait(POLL_S)
                break
            except subprocess.TimeoutExpired:
                watch()
        self._child = None
        return 128 + self._signals[0] if self._signals else code

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)
        if self._child is not None:
            self._child.send_signal(number)


def in_words(seconds: float) -> str:
    """Seconds as hours and minutes."""
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def _left(runs: Sequence[PlannedRun], guess_minutes: float) -> str:
    """Time that the study still needs; a running one counts by its last logged step."""
    statuses = [status_of(run) for run in runs]
    step_s = step_seconds(runs, statuses, guess_minutes)
    pairs = zip(runs, statuses, strict=True)
    return "about " + in_words(sum(remaining_s(r, s, step_s[r.arm]) for r, s in pairs))


def _words(status: RunStatus, run: PlannedRun) -> str:
    if status.progress is Progress.RESUMABLE:
        return f"interrupted after step {status.last_step} of {run.config.training.steps}"
    return str(status.progress)
