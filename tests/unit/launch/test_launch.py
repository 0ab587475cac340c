"""The launcher with stand-in workers: exit codes, first cause, nothing left behind (PX01)."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.launch_workers import (
    FAMILY,
    ROOT,
    guarded,
    is_running,
    leftovers,
    start_launcher,
    wait_for,
    wait_until_gone,
)

from rollverify.launch.launcher import main, rank_stage, torchrun_stage
from rollverify.launch.nodes import Nodes

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts the launcher with stand-in workers in a folder of their own."""
    return partial(start_launcher, tmp_path)


def test_success_is_exit_code_0_with_the_flags_passed_on(start: Start, tmp_path: Path) -> None:
    source = "import os, sys\nkeys = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')\n"
    source += "print(sys.argv[1:], [os.environ[key] for key in keys])\n"
    out, err = (child := start(source, "--training.steps", "3")).communicate(timeout=20)
    assert (child.returncode, err) == (0, "")
    assert out == "['--training.steps', '3'] ['0', '1', '0']\n"
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--dry-run", "--training.steps", "3"], ["--world-size", "2", "--training.steps", "3"]),
        (["--world-size", "64", "--dry-run"], ["--world-size", "2", "--world-size", "64"]),
    ],
)
def test_a_dry_run_plans_with_the_same_flags_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], expected: list[str]
) -> None:
    """argparse takes the last --world-size."""
    seen: list[list[str]] = []
    monkeypatch.setattr("rollverify.dry_run.check.main", lambda argv: seen.append(argv) or 7)
    monkeypatch.setattr(
        "rollverify.launch.launcher.launch", lambda *_, **__: pytest.fail("started")
    )
    assert main(["--nproc", "2", "--", *flags]) == 7
    assert seen == [expected]


def test_ranks_start_with_the_defaults_that_the_user_has_not_set(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The C library reads MALLOC_... before Python runs, so the rank cannot set it itself."""
    names = ["MALLOC_TRIM_THRESHOLD_", "GOMP_SPINCOUNT"]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    out, _ = start(f"import os\nprint(*(os.environ[n] for n in {names}))").communicate(timeout=20)
    assert out == f"{512 * 2**20} 7\n"


def test_user_error_is_one_line_and_exit_code_2(start: Start) -> None:
    out, err = (child := start(guarded("raise DataError('d.jsonl line 3: x')"))).communicate(
        timeout=20
    )
    assert (child.returncode, out, err) == (2, "", "error: d.jsonl line 3: x\n")


def test_internal_error_ends_with_its_cause_and_exit_code_1(start: Start) -> None:
    _, err = (child := start(guarded("1 // 0"))).communicate(timeout=20)
    lines = err.splitlines()
    assert child.returncode == 1
    assert lines[0].startswith("Traceback")
    assert lines[-1].startswith("error: ZeroDivisionError: ")


def test_killed_worker_is_named_and_exit_code_1(start: Start) -> None:
    source = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    _, err = (child := start(source)).communicate(timeout=20)
    assert child.returncode == 1
    assert err.splitlines()[-1].startswith("error: train_worker was ended by SIGKILL")


def test_worker_without_a_report_is_exit_code_1(start: Start) -> None:
    _, err = (child := start("raise SystemExit(9)")).communicate(timeout=20)
    assert child.returncode == 1
    assert err == "error: train_worker ended with code 9 without a report\n"


def test_prepare_runs_first_with_the_same_flags(start: Start) -> None:
    source = "import sys\nprint(__name__, sys.argv, flush=True)\n"
    source = source.replace("sys.argv", "sys.argv[1:]").replace("__name__", "__spec__.name")
    out, _ = start(source, "--run.seed", "4", prepare=source).communicate(timeout=20)
    flags = "['--run.seed', '4']"
    assert out == f"prepare_worker {flags}\ntrain_worker {flags}\n"


def test_failed_prepare_ends_the_job_with_its_code(start: Start) -> None:
    failing = guarded("raise DataError('disk full')")
    out, err = (child := start("print('trained')", prepare=failing)).communicate(timeout=20)
    assert (child.returncode, out, err) == (2, "", "error: disk full\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signal_to_the_launcher_leaves_no_process(
    number: int, start: Start, tmp_path: Path
) -> None:
    """PX01: child, grandchild and a child with a session of its own are gone within 10 s."""
    pid_file = tmp_path / "pids"
    child = start(FAMILY.format(before="", after="time.sleep(1000)"), str(pid_file))
    pids = [int(word) for word in wait_for(pid_file).split()]
    assert [pid for pid in pids if not is_running(pid)] == []
    child.send_signal(number)
    child.communicate(timeout=10)
    expected = -number if number == signal.SIGKILL else 128 + number
    assert child.returncode == expected
    assert wait_until_gone(pids, 5.0) == []
    deadline = time.monotonic() + 5
    while leftovers(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert leftovers(tmp_path) == []


def test_worker_that_ignores_signals_is_ended_after_the_grace(start: Start, tmp_path: Path) -> None:
    before = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    pid_file = tmp_path / "pids"
    source = FAMILY.format(before=before, after="time.sleep(1000)")
    child = start(source, str(pid_file), grace_s=0.5)
    pids = [int(word) for word in wait_for(pid_file).split()]
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=10)
    assert child.returncode == 143
    assert wait_until_gone(pids, 1.0) == []


def test_processes_left_by_a_finished_worker_are_ended(start: Start, tmp_path: Path) -> None:
    pid_file = tmp_path / "pids"
    child = start(FAMILY.format(before="", after="os._exit(0)"), str(pid_file))
    child.wait(timeout=20)
    pids = [int(word) for word in wait_for(pid_file).split()]
    assert child.returncode == 0
    assert wait_until_gone(pids, 1.0) == []


def test_worker_gets_one_signal_and_may_save(start: Start, tmp_path: Path) -> None:
    """A second signal would end it at once, before it has saved."""
    lines = ["stop = StopRequest()", f"open({str(tmp_path / 'up')!r}, 'w').write('up\\n')"]
    lines += ["while not stop.requested: time.sleep(0.01)", "time.sleep(0.5)", "stop.done()"]
    child = start(guarded(*lines, "print('saved')"))
    wait_for(tmp_path / "up")
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=10)
    assert (child.returncode, out) == (130, "saved\n")
    assert err.splitlines()[-1] == "stopped by SIGINT"


def test_second_signal_ends_the_run_at_once(start: Start, tmp_path: Path) -> None:
    up = str(tmp_path / "up")
    lines = ["stop = StopRequest()", f"open({up!r}, 'w').write('up\\n')"]
    lines += [
        "while not stop.requested: time.sleep(0.01)",
        f"open({up!r} + '2', 'w').write('2\\n')",
    ]
    child = start(guarded(*lines, "time.sleep(60)"), grace_s=60.0)
    wait_for(tmp_path / "up")
    child.send_signal(signal.SIGINT)
    wait_for(tmp_path / "up2")
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=5)
    assert child.returncode == 130


def test_ctrl_c_while_the_launcher_is_loaded_prints_nothing(tmp_path: Path) -> None:
    """A module it imports takes its time; run_train.sh starts the launcher like this."""
    source = f"import time\nopen({str(tmp_path / 'up')!r}, 'w').write('up\\n')\ntime.sleep(60)\n"
    (tmp_path / "tomli.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "rollverify.launch", "--nproc", "1", "--"]
    child = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "up")
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=10)
    assert (child.returncode, err) == (-signal.SIGINT, "")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nproc", "x", "--"], "NGPU (--nproc) must be a whole number >= 1, got 'x'"),
        (["--nproc", "0", "--"], "NGPU (--nproc) must be a whole number >= 1, got '0'"),
        (["--nproc", "1", "--", "--config", "no.toml"], "no.toml"),
        (["--nproc", "3", "--", "--rollout.prompts-per-step", "32"], "3"),
        (
            # default.toml compares with the engine's log-probs and leaves the anchor pass out.
            ["--nproc", "1", "--", "--routing-replay.mode", "trainer"],
            "routing_replay.mode = 'trainer' records experts in the anchor pass",
        ),
    ],
)
def test_bad_command_line_is_one_line_without_torch(flags: list[str], message: str) -> None:
    code = "import sys; from rollverify.launch.launcher import main; code = main(sys.argv[1:])\n"
    code += "assert 'torch' not in sys.modules; sys.exit(code)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.run(
        [sys.executable, "-c", code, *flags], env=environment, capture_output=True, text=True
    )
    assert child.returncode == 2
    assert child.stderr.startswith("error: ") and child.stderr.count("\n") == 1
    assert message in child.stderr


def test_ports_are_chosen_while_they_are_bound() -> None:
    """PX03: port 0 everywhere, so there is no time between a look-up and a bind."""
    _, variables = rank_stage("m", [])
    command, more = torchrun_stage("m", ["--a"], 2, Nodes())
    assert variables["MASTER_PORT"] == "0"
    assert command[command.index("--master-addr") + 1] == "127.0.0.1"
    assert command[command.index("--master-port") + 1] == "0"
    assert command[-3:] == ["--module", "m", "--a"] and more == {}
