"""Maths workers end with the process that started them, whatever they are doing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import sys, threading, time
from rollverify.rewards.math_reward import WORKER_MODULE
from rollverify.rewards.worker_pool import WorkerPool
pool = WorkerPool(WORKER_MODULE, num_workers=1, time_out_s=300.0)
assert pool.ask({"gold": "x+1", "answer": "1+x"})["verdict"] == "right"
question = {"gold": "x+1", "answer": r"10^{10^{10}}"}
threading.Thread(target=pool.ask, args=(question,), daemon=True).start()
time.sleep(0.5)
print(*pool.process_ids, flush=True)
time.sleep(600)
"""


def children_of(pid):
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_run_leaves_no_worker_even_in_the_middle_of_an_answer():
    run = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
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
