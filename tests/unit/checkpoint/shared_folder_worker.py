"""One of two ranks, as if on two machines, that test_shared_folder.py checks; not a test itself."""

import json
import os
from pathlib import Path

import torch.distributed as dist

from rollverify.checkpoint import run_folder
from rollverify.config.load import read_config
from rollverify.errors import ConfigError
from rollverify.ranks import Ranks


def told(folder: Path, world: Ranks, seed: int) -> str:
    try:
        run_folder.check_shared(folder, read_config([], {"run": {"seed": seed}}), world)
    except ConfigError as error:
        return str(error)
    return ""


def main(rank: int, world_size: int, folder: Path) -> None:
    run_folder.SHARED_WITHIN_S = 0.3
    world = Ranks.of(dist.group.WORLD)
    run = folder / "run"
    run.mkdir(exist_ok=True)
    own = folder / f"run-{rank}"
    own.mkdir()
    seen = {}
    for local, name in ((2, "one machine"), (1, "two machines")):
        os.environ["LOCAL_WORLD_SIZE"] = str(local)
        seen[name] = [
            told(run, world, seed=0),
            told(own, world, seed=0),  # The same path to users, two folders in truth.
            told(run, world, seed=rank),
        ]
    (folder / f"{rank}.json").write_text(json.dumps([seen, sorted(map(str, folder.rglob(".sh*")))]))
