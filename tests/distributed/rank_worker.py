"""Runs scenarios under torchrun: `rank_worker.py FOLDER NAME...`; rank 0 writes FOLDER/NAME.pt."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from support.rank_scenarios import MOE_SCENARIOS, SCENARIOS


def main(folder: Path, names: list[str]) -> None:
    for name in names:
        run, model, settings = (SCENARIOS | MOE_SCENARIOS)[name]
        result = run(folder / model, folder / f"run_{name}", **settings)
        if dist.get_rank() == 0:
            torch.save(result, folder / f"{name}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
