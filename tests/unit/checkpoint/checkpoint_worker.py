"""One rank of the checkpoints that test_checkpoint_ranks.py checks; not a test itself.

Arguments: rank, world size, folder. The last rank fails in its own part. Writes what was raised.
"""

import errno
import json
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from support.checkpoint_run import FakeRun, flip_a_bit

from rollverify.checkpoint.checkpoint import DIGEST_FILE
from rollverify.errors import CheckpointError

RANK, WORLD_SIZE = int(sys.argv[1]), int(sys.argv[2])
FOLDER = Path(sys.argv[3])


def fail(path: Path) -> None:
    if RANK == WORLD_SIZE - 1:
        raise OSError(errno.ENOSPC, "No space left on device")


def refuse(path: Path) -> None:
    if RANK == WORLD_SIZE - 1:
        raise CheckpointError(f"{path.name}/rank-{RANK} is damaged; delete it")


def raised_by(action) -> list[str]:
    try:
        action()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def main() -> None:
    run = FakeRun(FOLDER / "checkpoints", rank=RANK)
    run.own = {"rank": RANK}
    run.checkpoint.save(1)
    run.save_rank = fail
    failed_save = raised_by(lambda: run.checkpoint.save(2))
    other = FakeRun(FOLDER / "checkpoints", rank=RANK)
    step = other.checkpoint.load_latest(100)
    own = other.own
    other.load_rank = refuse
    failed_load = raised_by(lambda: other.checkpoint.load_latest(100))
    result = {"save": failed_save, "load": failed_load, "step": step, "own": own}
    saved = FOLDER / "checkpoints" / "step-1"
    result["digests"] = sorted(json.loads((saved / DIGEST_FILE).read_text()))
    dist.barrier()
    if RANK == 0:
        flip_a_bit(saved / "__1_0.distcp")
    dist.barrier()
    result["flipped"] = raised_by(lambda: other.checkpoint.load_latest(100))
    (FOLDER / f"rank_{RANK}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(FOLDER / "store"), WORLD_SIZE),
        rank=RANK,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=20),
    )
    main()
    dist.destroy_process_group()
