"""How one rank ends, seen from outside through tiny scripts (cases PX01)."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.launch_workers import ROOT, wait_until_gone

from rollverify.errors import ConfigError
from rollverify.launch.shutdown import (
    ERROR_DIR_VARIABLE,
    STOP_GRACE_VARIABLE,
    RankError,
    die_with_parent,
    read_rank_errors,
    save_rank_error,
    stop_grace_s,
    write_rank_error,
)

PREAMBLE = """
import logging, os, signal, sys, time
from rollverify.launch.shutdown import StopRequest
logging.basicConfig(level=logging.INFO, format="%(message)s")
"""


def start(body: str) -> subprocess.Popen[str]:
    """A Python process with a StopRequest in reach; it prints "ready" when signals may come."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-u", "-c", PREAMBLE + body]
    child = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def make_error(rank: int, time_s: float) -> RankError:
    return RankError(rank=rank, time=time_s, kind="internal", message=f"m{rank}", traceback="")


def test_stop_request_finishes_the_step_and_says_so() -> None:
    child = start("""
stop = StopRequest(limit_s=20)
print("ready")
while not stop.requested:
    time.sleep(0.01)
time.sleep(0.3)  # the step that was running
stop.done()
print("saved")
sys.exit(stop.exit_code)
""")
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=10)
    assert child.returncode == 130  # 128 + 2
    assert out == "saved\n"
    assert err == "finishing this step; press Ctrl-C again to stop now\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stop_request_ends_a_step_that_takes_too_long(number: int, code: int) -> None:
    child = start('stop = StopRequest(limit_s=0.3)\nprint("ready")\ntime.sleep(60)\n')
    child.send_signal(number)
    child.communicate(timeout=10)
    assert child.returncode == code


def test_stop_request_ends_a_main_thread_that_is_stuck_in_c() -> None:
    """A mutex locked twice never returns to Python, like a collective whose peer is gone."""
    child = start("""
import ctypes
stop = StopRequest(limit_s=0.3)
mutex = ctypes.create_string_buffer(64)
lock = ctypes.CDLL(None).pthread_mutex_lock
lock(mutex)
print("ready")
lock(mutex)
""")
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=10)
    assert child.returncode == 143


def test_stop_request_done_keeps_the_process_alive() -> None:
    child = start("""
stop = StopRequest(limit_s=0.2)
print("ready")
while not stop.requested:
    time.sleep(0.01)
stop.done()
time.sleep(0.6)  # three times the limit
sys.exit(7)
""")
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=10)
    assert child.returncode == 7


def test_stop_request_second_signal_ends_at_once() -> None:
    child = start('stop = StopRequest(limit_s=60)\nprint("ready")\ntime.sleep(60)\n')
    child.send_signal(signal.SIGTERM)
    assert child.stderr is not None
    child.stderr.readline()  # the first signal has been taken
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=5)
    assert child.returncode == 130


def test_stop_request_ignores_a_signal_to_a_forked_child() -> None:
    child = start("""
stop = StopRequest(limit_s=60)
pid = os.fork()
if pid == 0:
    time.sleep(60)
    os._exit(0)
print("ready")
os.kill(pid, signal.SIGTERM)
_, status = os.waitpid(pid, 0)
time.sleep(0.2)
sys.exit(3 if os.WTERMSIG(status) == signal.SIGTERM and not stop.requested else 4)
""")
    child.communicate(timeout=10)
    assert child.returncode == 3


def test_stop_request_close_restores_the_handlers() -> None:
    child = start("""
stop = StopRequest()
stop.close()
print("ready")
sys.exit(0 if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and stop.exit_code == 0 else 1)
""")
    child.communicate(timeout=10)
    assert child.returncode == 0


def test_child_dies_with_a_killed_parent(tmp_path: Path) -> None:
    """PX01: SIGKILL leaves the parent no chance to end its child."""
    parent = start("""
import subprocess
code = "from rollverify.launch.shutdown import die_with_parent; die_with_parent()"
code += "; print('ready', flush=True)"
child = subprocess.Popen([sys.executable, "-c", code + "; import time; time.sleep(60)"])
print(child.pid, file=sys.stderr)
time.sleep(60)
""")
    assert parent.stderr is not None
    pid = int(parent.stderr.readline())
    parent.kill()
    parent.communicate(timeout=5)
    assert wait_until_gone([pid], 5.0) == []


def test_die_with_parent_keeps_a_process_whose_parent_lives() -> None:
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5


def test_user_error_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ERROR_DIR_VARIABLE, raising=False)
    assert write_rank_error(ConfigError("a.toml: unknown key 'x';\n drop it")) == 2
    assert capsys.readouterr().err == "error: a.toml: unknown key 'x'; drop it\n"


def test_internal_error_is_a_traceback_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ERROR_DIR_VARIABLE, raising=False)
    try:
        _ = 1 // 0
    except ZeroDivisionError as error:
        error.add_note("step 12")
        assert write_rank_error(error) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and "_ = 1 // 0" in err and "step 12" in err


def test_report_holds_rank_kind_and_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ERROR_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    before = time.time()
    write_rank_error(KeyError("reward"))
    assert capsys.readouterr().err == ""  # the launcher prints it
    report = json.loads((tmp_path / "rank-3.json").read_text())
    assert before <= report.pop("time") <= time.time()
    assert "KeyError" in report.pop("traceback")
    assert report == {"rank": 3, "kind": "internal", "message": "KeyError: 'reward'"}


def test_report_falls_back_to_stderr_when_the_folder_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ERROR_DIR_VARIABLE, str(tmp_path / "gone"))
    write_rank_error(ConfigError("bad"))
    assert capsys.readouterr().err == "error: bad\n"


def test_first_report_of_a_rank_is_kept_and_reports_are_in_order_of_time(tmp_path: Path) -> None:
    for report in (make_error(0, 20.0), make_error(1, 10.0), make_error(0, 5.0)):
        assert save_rank_error(report, tmp_path)
    assert [(r.rank, r.time) for r in read_rank_errors(tmp_path)] == [(1, 10.0), (0, 20.0)]
    assert {file.name for file in tmp_path.iterdir()} == {"rank-0.json", "rank-1.json"}


@pytest.mark.parametrize(("text", "seconds"), [("", 10.0), ("2.5", 2.5), ("-1", 10.0), ("x", 10.0)])
def test_stop_grace_reads_the_environment(
    text: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STOP_GRACE_VARIABLE, text)
    assert stop_grace_s() == seconds
