"""Carrying a plan out, with a stand-in for the launcher."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from unit.study.folders import checkpoint, own, study, write_run

from rollverify.config.load import load_config
from rollverify.study import runner
from rollverify.study.plan import plan_runs
from rollverify.study.runner import LaunchedRun, in_words, plan_lines, run_all


class Launcher:
    """Writes complete run folders; fails or stops where told."""

    def __init__(self, runs, codes=()):
        self.runs, self.codes, self.commands = runs, list(codes), []

    def __call__(self, command, log, watch):
        watch()
        self.commands.append(command)
        code = self.codes.pop(0) if self.codes else 0
        if not code:
            (run,) = [one for one in self.runs if one.place == log.parent]
            write_run(run.place / f"made-{len(self.commands)}", own(run))
        return code


@pytest.fixture
def runs(tmp_path):
    return plan_runs(study(), tmp_path)


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid):
    """False also for a process that has ended and that nobody has waited for."""
    file = Path(f"/proc/{pid}/stat")
    return file.exists() and file.read_text().rpartition(")")[2].split()[0] != "Z"


def carry_out(runs, launcher):
    said = []
    return *run_all(runs, 1.0, launcher, said.append), said


def test_every_run_is_started_once(runs):
    launcher = Launcher(runs)
    code, failed, said = carry_out(runs, launcher)
    assert (code, failed, len(launcher.commands)) == (0, [], 4)
    assert said[-1] == "[4/4] rollverify, seed 1: done; about 0 min left"


def test_a_run_is_started_from_a_config_file_of_its_own(runs):
    launcher = Launcher(runs)
    carry_out(runs, launcher)
    words = launcher.commands[1][-2:]
    assert words == ["--config", str(runs[1].place / "config.toml")]
    assert load_config(words).config == runs[1].config


def test_a_complete_study_starts_nothing(runs):
    carry_out(runs, Launcher(runs))
    launcher = Launcher(runs)
    assert carry_out(runs, launcher)[:2] == (0, [])
    assert launcher.commands == []


def test_an_interrupted_run_is_resumed_in_its_folder(runs):
    folder = write_run(runs[0].place / "a", own(runs[0]), num_steps=2, has_final=False)
    checkpoint(folder, 1)
    launcher = Launcher(runs)
    carry_out(runs[:1], launcher)
    assert launcher.commands[0][-2:] == ["--resume", str(folder)]


@pytest.mark.parametrize(("code", "expected"), [(130, 130), (-15, 143)])
def test_a_stopped_run_ends_the_study_and_the_next_start_goes_on(runs, code, expected):
    launcher = Launcher(runs, [0, code])
    assert carry_out(runs, launcher)[0] == expected
    assert len(launcher.commands) == 2
    again = Launcher(runs)
    assert carry_out(runs, again)[0] == 0
    assert len(again.commands) == 3


def test_a_failed_run_does_not_stop_the_others_and_is_named(runs):
    launcher = Launcher(runs, [0, 1])
    code, failed, said = carry_out(runs, launcher)
    assert (code, len(launcher.commands)) == (0, 4)
    assert failed == ["rollverify, seed 0"]
    assert f"failed with exit code 1, see {runs[1].place / 'output.log'}" in "\n".join(said)


def test_a_run_that_ends_well_but_incomplete_has_failed(runs):
    _, failed, _ = carry_out(runs[:1], lambda *_: 0)
    assert len(failed) == 1


def test_the_plan_says_what_is_left(runs):
    carry_out(runs[:1], Launcher(runs))
    lines = plan_lines(runs, 1.0)
    assert lines[0].startswith("on_policy, seed 0: complete, 0 min left")
    assert lines[1].startswith("rollverify, seed 0: not started, 1 min left")
    # three runs of 40 s and 3 steps of 5.5 s each
    assert lines[-1] == "all: 3 min left (measured in the runs so far)"


def test_a_command_writes_its_log_and_gives_its_code(tmp_path):
    with LaunchedRun() as launched:
        words = [sys.executable, "-c", "print('hello'); raise SystemExit(3)"]
        assert launched(words, tmp_path / "log", lambda: None) == 3
    assert (tmp_path / "log").read_text() == "hello\n"


def test_a_key_in_the_terminal_does_not_reach_the_run_twice(tmp_path):
    """It goes to the whole session of the terminal, and we pass it on."""
    with LaunchedRun() as launched:
        words = [sys.executable, "-c", "import os; print(os.getsid(0) == os.getpid())"]
        launched(words, tmp_path / "log", lambda: None)
    assert (tmp_path / "log").read_text() == "True\n"


def test_a_signal_reaches_the_run_and_ends_the_study(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "SAY_EVERY_S", 0.05)
    script = "import time; print('up', flush=True); time.sleep(60)"
    with LaunchedRun() as launched:

        def watch():
            if (tmp_path / "log").read_text() == "up\n":
                signal.raise_signal(signal.SIGTERM)

        start = time.monotonic()
        assert launched([sys.executable, "-c", script], tmp_path / "log", watch) == 143
        assert launched([sys.executable, "-c", script], tmp_path / "log2", watch) == 143
    assert time.monotonic() - start < 30
    assert not (tmp_path / "log2").exists()


def test_a_run_does_not_outlive_a_study_that_is_killed(tmp_path):
    file = tmp_path / "pid"
    child = f"import os, time; open(r'{file}', 'w').write(f'{{os.getpid()}} '); time.sleep(60)"
    parent = (
        "import sys; from pathlib import Path; from rollverify.study.runner import LaunchedRun\n"
        f"LaunchedRun()([sys.executable, '-c', {child!r}], Path(r'{tmp_path}/log'), lambda: None)"
    )
    study_process = subprocess.Popen([sys.executable, "-c", parent])
    wait_for(lambda: file.is_file() and file.read_text().endswith(" "))
    study_process.kill()
    study_process.wait()
    wait_for(lambda: not is_running(int(file.read_text())))


def test_times_are_said_in_hours_and_minutes():
    assert [in_words(s) for s in (29, 31, 3580)] == ["0 min", "1 min", "1 h 0 min"]
    assert in_words(5400) == "1 h 30 min"
