"""Replay under torchrun: `replay_worker.py FOLDER`; rank 0 writes FOLDER/NAME.pt per layout."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from support.replay_scenarios import LAYOUTS, replay_scenario


def main(folder: Path) -> None:
    for name, changes in LAYOUTS.items():
        result = replay_scenario(folder / "model", folder / f"run_{name}", **changes)
        if dist.get_rank() == 0:
            torch.save(result, folder / f"{name}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
