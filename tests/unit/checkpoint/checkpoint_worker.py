"""One rank of the checkpoints that test_checkpoint_ranks.py checks; not a test itself.

The last rank fails in its own part. Writes what was raised.
"""

import errno
import json
from pathlib import Path

import torch.distributed as dist
from support.checkpoint_run import FakeRun, flip_a_bit

from rollverify.checkpoint.checkpoint import DIGEST_FILE
from rollverify.errors import CheckpointError


def fail(path: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def refuse(path: Path) -> None:
    raise CheckpointError(f"{path.name}/rank-{dist.get_rank()} is damaged; delete it")


def raised_by(action) -> list[str]:
    try:
        action()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def main(rank: int, world_size: int, folder: Path) -> None:
    run = FakeRun(folder / "checkpoints", rank=rank)
    run.own = {"rank": rank}
    run.checkpoint.save(1)
    if rank == world_size - 1:
        run.save_rank = fail
    failed_save = raised_by(lambda: run.checkpoint.save(2))
    other = FakeRun(folder / "checkpoints", rank=rank)
    step = other.checkpoint.load_latest(100)
    own = other.own
    if rank == world_size - 1:
        other.load_rank = refuse
    failed_load = raised_by(lambda: other.checkpoint.load_latest(100))
    result = {"save": failed_save, "load": failed_load, "step": step, "own": own}
    saved = folder / "checkpoints" / "step-1"
    result["digests"] = sorted(json.loads((saved / DIGEST_FILE).read_text()))
    dist.barrier()
    if rank == 0:
        flip_a_bit(saved / "__1_0.distcp")
    dist.barrier()
    result["flipped"] = raised_by(lambda: other.checkpoint.load_latest(100))
    (folder / f"rank_{rank}.json").write_text(json.dumps(result))
