"""The worker process: limits of time and memory, and its end with the process that started it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollverify.rewards import worker_pool
from rollverify.rewards.worker_pool import WorkerPool

SCRIPT = """
import threading, time
from rollverify.rewards.worker_pool import WorkerPool
pool = WorkerPool("tests.support.hostile_worker", num_workers=1, time_out_s=300.0)
pool.ask({"gold": "", "answer": "fine"})
{busy}threading.Thread(target=pool.ask, args=({"gold": "", "answer": "loop"},), daemon=True).start()
time.sleep(0.5)
print(*pool.process_ids, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def pool():
    pool = WorkerPool("tests.support.hostile_worker", num_workers=1, time_out_s=1.0)
    yield pool
    pool.close()


def verdict(pool, answer):
    return pool.ask({"gold": "", "answer": answer})["verdict"]


@pytest.mark.parametrize("answer", ["C code", "loop"])
def test_the_worker_keeps_its_time_limit_in_python_and_in_c_code(pool, answer, monkeypatch):
    """The limit is 1 s; the pool, which would kill the worker, looks on for 60 s."""
    monkeypatch.setattr(worker_pool, "GRACE_S", 60.0)
    verdict(pool, "fine")
    start, before = time.monotonic(), pool.process_ids
    assert verdict(pool, answer) == "timeout"
    assert 0.9 < time.monotonic() - start < 30
    assert verdict(pool, "fine") == "right" and pool.process_ids == before


@pytest.mark.parametrize("answer", ["memory", "recursion", "error", "killed"])
def test_a_failure_is_an_error_of_one_answer_in_the_same_process(pool, answer):
    verdict(pool, "fine")
    before = pool.process_ids
    assert [verdict(pool, answer), verdict(pool, "fine")] == ["error", "right"]
    assert pool.process_ids == before


def test_what_a_comparison_prints_is_no_reply(pool):
    assert verdict(pool, "output") == "right"


def test_a_child_is_replaced_when_its_memory_is_in_doubt(pool):
    """A poisoned child is seen by the next answer, and gone after an answer without memory."""
    answers = ["poison", "fine", "memory", "fine"]
    assert [verdict(pool, one) for one in answers] == ["poisoned", "poisoned", "error", "right"]


def children_of(pid):
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("busy", ["", "#"], ids=["busy", "idle"])
def test_a_killed_run_leaves_no_worker(busy):
    script = SCRIPT.replace("{busy}", busy)
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        worker = int(run.stdout.readline())
        pids = [worker, *children_of(worker)]
        assert len(pids) == 2 and all(map(is_running, pids))
        os.kill(run.pid, signal.SIGKILL)
        deadline = time.monotonic() + 15
        while any(map(is_running, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(is_running, pids))
    finally:
        run.kill()
        run.wait()
        run.stdout.close()
