"""The launcher with stand-in workers: exit codes, first cause, nothing left behind (PX01, PX03)."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollverify.launch import rank_stage, torchrun_stage

ROOT = Path(__file__).resolve().parents[2]

DRIVER = """
import sys
from rollverify.launch import Modules, launch
ranks, prepare, *argv = sys.argv[1:]
modules = Modules(train="train_worker", prepare="prepare_worker")
sys.exit(launch(argv, int(ranks), needs_prepare=prepare == "prepare", modules=modules))
"""

GUARDED = """
import os, sys, time
from rollverify.errors import DataError
from rollverify.shutdown import StopRequest, write_rank_error
rank = int(os.environ["RANK"])
try:
{body}
except BaseException as error:
    sys.exit(write_rank_error(error))
"""

FAMILY = """
import os, pathlib, signal, subprocess, sys, time
{before}
code = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); input()"
child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, text=True)
lone = subprocess.Popen(["sleep", "1000"], start_new_session=True)
pids = [os.getpid(), child.pid, int(child.stdout.readline()), lone.pid]
pathlib.Path(sys.argv[1]).write_text(" ".join(map(str, pids)) + "\\n")
{after}
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts the launcher; `train` and `prepare` are the sources of the stand-in workers."""

    def run(
        train: str, *argv: str, ranks: int = 1, prepare: str = "", grace_s: float = 10.0
    ) -> "subprocess.Popen[str]":
        (tmp_path / "train_worker.py").write_text(train)
        (tmp_path / "prepare_worker.py").write_text(prepare)
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}",
            "ROLLVERIFY_STOP_GRACE_S": str(grace_s),
            "TMPDIR": str(tmp_path),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-c", DRIVER, str(ranks), "prepare" if prepare else "-", *argv]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return run


def guarded(*lines: str) -> str:
    """Source of a worker whose main function runs these lines and reports what they raise."""
    return GUARDED.format(body="\n".join(f"    {line}" for line in lines))


def wait_for(file: Path, timeout_s: float = 20.0) -> str:
    """The file's text, as soon as it ends with a line break."""
    deadline = time.monotonic() + timeout_s
    while not (file.exists() and file.read_text().endswith("\n")):
        assert time.monotonic() < deadline, f"{file.name} did not appear"
        time.sleep(0.02)
    return file.read_text()


def is_running(pid: int) -> bool:
    """False for ended processes, and for those that only wait to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int], timeout_s: float) -> list[int]:
    """The process ids that still run after the time given."""
    deadline = time.monotonic() + timeout_s
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def leftovers(folder: Path) -> list[str]:
    """What runs left in their folder for temporary files."""
    return [entry.name for entry in folder.iterdir() if entry.name.startswith("rollverify-")]


def test_success_is_exit_code_0_with_the_flags_passed_on(start: Start, tmp_path: Path) -> None:
    source = "import os, sys\nkeys = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')\n"
    source += "print(sys.argv[1:], [os.environ[key] for key in keys])\n"
    out, err = (child := start(source, "--training.steps", "3")).communicate(timeout=20)
    assert (child.returncode, err) == (0, "")
    assert out == "['--training.steps', '3'] ['0', '1', '0']\n"
    assert leftovers(tmp_path) == []


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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nproc", "x", "--"], "NGPU (--nproc) must be a whole number >= 1, got 'x'"),
        (["--nproc", "0", "--"], "NGPU (--nproc) must be a whole number >= 1, got '0'"),
        (["--nproc", "1", "--", "--config", "no.toml"], "no.toml"),
        (["--nproc", "3", "--", "--rollout.prompts-per-step", "32"], "3"),
    ],
)
def test_bad_command_line_is_one_line_without_torch(flags: list[str], message: str) -> None:
    code = "import sys; from rollverify.launch import main; code = main(sys.argv[1:])\n"
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
    command, more = torchrun_stage("m", ["--a"], 2)
    assert variables["MASTER_PORT"] == "0"
    assert command[command.index("--rdzv-endpoint") + 1] == "127.0.0.1:0"
    assert command[-3:] == ["--module", "m", "--a"] and more == {}


GLOO = """
import torch.distributed as dist, torch
dist.init_process_group("gloo")
value = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(value)
print(f"sum {value.item():.0f}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "runs"), [(1, 8), (2, 3)])
def test_launches_at_once_do_not_clash(ranks: int, runs: int, start: Start) -> None:
    """PX03: each run forms its own group; 1 rank sums to 1, 2 ranks to 1 + 2 = 3."""
    children = [start(GLOO, ranks=ranks) for _ in range(runs)]
    expected = f"sum {1 if ranks == 1 else 3}\n" * ranks
    for child in children:
        out, err = child.communicate(timeout=120)
        assert (child.returncode, out) == (0, expected), err


@pytest.mark.slow
@pytest.mark.distributed
def test_error_on_one_rank_ends_all_ranks_with_its_cause_last(start: Start) -> None:
    lines = ["print(rank, flush=True)", "if rank == 1: raise DataError('broken line 7')"]
    child = start(guarded(*lines, "time.sleep(1000)"), ranks=2)
    begun = time.monotonic()
    out, err = child.communicate(timeout=60)
    assert child.returncode == 2
    assert sorted(out.split()) == ["0", "1"]
    assert err.splitlines()[-1] == "error: rank 1: broken line 7"
    assert time.monotonic() - begun < 40


@pytest.mark.slow
@pytest.mark.distributed
def test_killed_rank_is_the_first_cause_before_what_its_peers_say(start: Start) -> None:
    lines = ["import signal, torch, torch.distributed as dist", "dist.init_process_group('gloo')"]
    lines += [
        "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)",
        "dist.all_reduce(torch.ones(1))",
    ]
    child = start(guarded(*lines, "time.sleep(1000)"), ranks=2)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert err.splitlines()[-1].startswith("error: rank 1: the process was ended by SIGKILL")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signal_with_two_ranks_leaves_no_process(number: int, start: Start, tmp_path: Path) -> None:
    """PX01 through torchrun, whose ranks have sessions of their own."""
    source = FAMILY.format(before="sys.argv[1] += os.environ['RANK']", after="time.sleep(1000)")
    child = start(source, str(tmp_path / "pids"), ranks=2)
    files = [wait_for(tmp_path / f"pids{rank}", 40) for rank in range(2)]
    pids = [int(word) for text in files for word in text.split()]
    child.send_signal(number)
    child.communicate(timeout=12)
    assert child.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert wait_until_gone(pids, 5.0) == []
