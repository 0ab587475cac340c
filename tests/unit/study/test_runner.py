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
        self.runs, self.codes, self.commands, self.said = runs, list(codes), [], []

    def __call__(self, command, log, watch):
        watch()
        self.commands.append(command)
        code = self.codes.pop(0) if self.codes else 0
        if not code:
            (run,) = [run for run in self.runs if run.place == log.parent]
            write_run(run.place / f"made-{len(self.commands)}", own(run))
        return code

    def carry_out(self):
        """(exit code, failed runs, number of runs that were started)."""
        return *run_all(self.runs, 1.0, self, self.said.append), len(self.commands)


@pytest.fixture
def runs(tmp_path):
    return plan_runs(study(), tmp_path)


def test_every_run_is_started_once_from_a_config_file_of_its_own(runs):
    launcher = Launcher(runs)
    assert launcher.carry_out() == (0, [], 4)
    assert launcher.said[-1] == "[4/4] rollverify, seed 1: done; about 0 min left"
    words = launcher.commands[1][-2:]
    assert words == ["--config", str(runs[1].place / "config.toml")]
    assert load_config(words).config == runs[1].config
    assert Launcher(runs).carry_out() == (0, [], 0)


def test_an_interrupted_run_is_resumed_in_its_folder(runs):
    folder = write_run(runs[0].place / "a", own(runs[0]), num_steps=2, has_final=False)
    checkpoint(folder, 1)
    launcher = Launcher(runs[:1])
    launcher.carry_out()
    assert launcher.commands[0][-2:] == ["--resume", str(folder)]
    assert launcher.said[0].endswith("interrupted after step 2 of 3, starting")
    assert launcher.said[1].endswith("step 2/3; about 1 min left")


@pytest.mark.parametrize(("code", "expected"), [(130, 130), (-15, 143)])
def test_a_stopped_run_ends_the_study_and_the_next_start_goes_on(runs, code, expected):
    assert Launcher(runs, [0, code]).carry_out() == (expected, [], 2)
    assert Launcher(runs).carry_out() == (0, [], 3)


def test_a_failed_run_does_not_stop_the_others_and_is_named(runs):
    launcher = Launcher(runs, [0, 1])
    assert launcher.carry_out() == (0, ["rollverify, seed 0"], 4)
    log = runs[1].place / "output.log"
    assert f"[2/4] rollverify, seed 0: failed with exit code 1, see {log}" in launcher.said


def test_a_run_that_ends_well_but_incomplete_has_failed(runs):
    assert len(run_all(runs[:1], 1.0, lambda *_: 0, print)[1]) == 1


def test_the_plan_says_what_is_left(runs):
    Launcher(runs[:1]).carry_out()
    lines = plan_lines(runs, 1.0)
    assert lines[0].startswith("on_policy, seed 0: complete, 0 min left")
    assert lines[1].startswith("rollverify, seed 0: not started, 1 min left")
    # three runs of 40 s and 3 steps of 5.5 s each
    assert lines[-1] == "all: 3 min left (measured in the runs so far)"


def test_a_command_writes_its_log_and_gives_its_code(tmp_path):
    """In a session of its own, as a key in the terminal reaches us, and we pass it on."""
    script = "import os; print(os.getsid(0) == os.getpid()); raise SystemExit(3)"
    with LaunchedRun() as launched:
        assert launched([sys.executable, "-c", script], tmp_path / "log", lambda: None) == 3
    assert (tmp_path / "log").read_text() == "True\n"


def test_a_signal_reaches_the_run_and_ends_the_study(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "SAY_EVERY_S", 0.05)
    words = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
    with LaunchedRun() as launched:

        def watch():
            if (tmp_path / "log").read_text() == "up\n":
                signal.raise_signal(signal.SIGTERM)

        start = time.monotonic()
        assert launched(words, tmp_path / "log", watch) == 143
        assert launched(words, tmp_path / "log2", watch) == 143
    assert time.monotonic() - start < 30
    assert not (tmp_path / "log2").exists()


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid):
    """False also for a process that has ended and that nobody has waited for."""
    file = Path(f"/proc/{pid}/stat")
    return file.exists() and file.read_text().rpartition(")")[2].split()[0] != "Z"


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
    assert [in_words(s) for s in (29, 31, 3580, 5400)] == [
        "0 min",
        "1 min",
        "1 h 0 min",
        "1 h 30 min",
    ]
