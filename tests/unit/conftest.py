"""Fixtures shared by the unit tests."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from rollverify.log import _LIBRARY_LOGGERS, _OWN_LOGGERS

WORKER_TIMEOUT_S = 60


@pytest.fixture(autouse=True)
def restore_logging() -> Iterator[None]:
    """Leave the process's handlers and levels as they were: programs under test set them up."""
    root = logging.getLogger()
    loggers = [root, *(logging.getLogger(name) for name in (*_OWN_LOGGERS, *_LIBRARY_LOGGERS))]
    handlers, levels = list(root.handlers), [logger.level for logger in loggers]
    yield
    root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A gloo group of this process alone, met through a file; the test may end it itself."""
    import torch.distributed as dist  # Tests without torch share this file.

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(
        "gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=30)
    )
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def run_gloo_workers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Path, int], Path]:
    """Run `worker.py RANK WORLD_SIZE FOLDER` once per rank and return FOLDER.

    The workers meet through a file in FOLDER, so no port is needed; each is killed by its own
    pid after a timeout.
    """

    def run(script: Path, world_size: int) -> Path:
        folder = tmp_path_factory.mktemp(f"world_{world_size}")
        workers = [start_worker(script, rank, world_size, folder) for rank in range(world_size)]
        try:
            for worker in workers:
                _, errors = worker.communicate(timeout=WORKER_TIMEOUT_S)
                assert worker.returncode == 0, errors
        finally:
            for worker in workers:
                worker.kill()  # Does nothing to a process that has ended.
                worker.wait()
        return folder

    return run


def start_worker(script: Path, rank: int, world_size: int, folder: Path) -> subprocess.Popen[str]:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(script), str(rank), str(world_size), str(folder)]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
