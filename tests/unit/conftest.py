"""Fixtures shared by the unit tests."""

import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import pytest
from support.gloo_rank import run_rank

from rollverify.log import _LIBRARY_LOGGERS, _OWN_LOGGERS

WORKER_TIMEOUT_S = 60
WorkerMain = Callable[[int, int, Path], None]


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
) -> Callable[[WorkerMain, int], Path]:
    """Run `main(rank, world_size, folder)` once per rank and return the folder.

    The ranks are forked from a server that has imported what they need, meet through a file, so
    that no port is needed, and are killed after a timeout.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["tensordict", "torch.distributed.checkpoint"])

    def run(main: WorkerMain, world_size: int) -> Path:
        folder = tmp_path_factory.mktemp(f"world_{world_size}")
        ranks = [
            context.Process(target=run_rank, args=(main, rank, world_size, folder))
            for rank in range(world_size)
        ]
        try:
            for process in ranks:
                process.start()
            for process in ranks:
                process.join(WORKER_TIMEOUT_S)
                assert process.exitcode == 0, (folder / "errors").read_text()
        finally:
            for process in ranks:
                process.kill()  # Does nothing to a process that has ended.
        return folder

    return run
