"""Starts torchrun for the tests with several ranks."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., None]:
    """Run `script ARGUMENTS...` on two ranks and wait for it.

    The ranks get a process group of their own, so that a timeout ends all of them.
    """

    def run(script: str, *arguments: str, timeout_s: float) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)]),
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "OMP_NUM_THREADS": "1",
        }
        process = subprocess.Popen(
            [*command, str(HERE / script), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"{script} did not end within {timeout_s:g} s:\n{output[-4000:]}")
        assert process.returncode == 0, output[-4000:]

    return run
