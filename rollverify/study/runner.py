"""Carries a plan out: starts what is missing, resumes what was interrupted, foretells the time."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from rollverify.checkpoint.run_folder import CONFIG_TOML, write_config
from rollverify.launch.shutdown import die_with_parent
from rollverify.study.plan import PlannedRun
from rollverify.study.status import Progress, RunStatus, seconds_left, status_of

LAUNCHER = (sys.executable, "-m", "rollverify.launch", "--nproc", "1", "--")
SAY_EVERY_S = 60.0

Execute = Callable[[Sequence[str], Path, Callable[[], None]], int]
"""(command, log file, called every minute) -> exit code, negative or above 128 for a signal."""


def plan_lines(runs: Sequence[PlannedRun], guess_minutes: float) -> list[str]:
    """The plan with what is done of it, and the time it needs; see `seconds_left`."""
    statuses, left = [status_of(run) for run in runs], seconds_left(runs, guess_minutes)
    lines = [
        f"{run.name}: {_words(status, run)}, {in_words(seconds)} left  [{run.place}]"
        for run, status, seconds in zip(runs, statuses, left, strict=True)
    ]
    is_measured = any(status.step_s is not None for status in statuses)
    basis = "measured in the runs so far" if is_measured else "guessed by the study file"
    return [*lines, f"all: {in_words(sum(left))} left ({basis})"]


def run_all(
    runs: Sequence[PlannedRun], guess_minutes: float, execute: Execute, say: Callable[[str], None]
) -> tuple[int, list[str]]:
    """Carry out what is left of a plan; a run that fails does not stop the others.

    Returns (128 + signal that stopped the study, or 0; names of the runs that failed).
    """
    seconds_left(runs, guess_minutes)
    failed: list[str] = []

    def left() -> str:
        return f"about {in_words(sum(seconds_left(runs, guess_minutes)))} left"

    for number, run in enumerate(runs, 1):
        status, log = status_of(run), run.place / "output.log"
        title = f"[{number}/{len(runs)}] {run.name}"
        if status.progress is Progress.COMPLETE:
            say(f"{title}: complete already")
            continue
        say(f"{title}: {_words(status, run)}, starting")

        def watch(run: PlannedRun = run, title: str = title) -> None:
            say(f"{title}: step {status_of(run).last_step}/{run.config.training.steps}; {left()}")

        code = execute(_command(run, status), log, watch)
        if code < 0 or code > 128:
            say(f"{title}: stopped; the same command goes on from here")
            return 128 - code if code < 0 else code, failed
        if code or status_of(run).progress is not Progress.COMPLETE:
            failed.append(run.name)
            say(f"{title}: failed with exit code {code}, see {log}")
        else:
            say(f"{title}: done; {left()}")
    return 0, failed


def _command(run: PlannedRun, status: RunStatus) -> list[str]:
    """What goes on with the run, or starts it from a config file of its own."""
    if status.progress is Progress.RESUMABLE:
        return [*LAUNCHER, "--resume", str(status.folder)]
    run.place.mkdir(parents=True, exist_ok=True)
    write_config(run.place, run.config)
    return [*LAUNCHER, "--config", str(run.place / CONFIG_TOML)]


class LaunchedRun:
    """Runs commands one after the other; a signal to us reaches the run once and ends the study."""

    def __init__(self) -> None:
        self._signal = 0
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "LaunchedRun":
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._old = {number: signal.signal(number, self._pass_on) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def __call__(self, command: Sequence[str], log: Path, watch: Callable[[], None]) -> int:
        """Run a command to its end; see `Execute`."""
        if self._signal:
            return 128 + self._signal
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
                code = self._child.wait(SAY_EVERY_S)
                break
            except subprocess.TimeoutExpired:
                watch()
        self._child = None
        return 128 + self._signal if self._signal else code

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._signal = self._signal or number
        if self._child is not None:
            self._child.send_signal(number)


def in_words(seconds: float) -> str:
    """Seconds as hours and minutes."""
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def _words(status: RunStatus, run: PlannedRun) -> str:
    if status.progress is Progress.RESUMABLE:
        return f"interrupted after step {status.last_step} of {run.config.training.steps}"
    return str(status.progress)
