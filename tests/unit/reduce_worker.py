"""One rank of the reduction that test_reduction.py checks; not a test itself.

Arguments: rank, world size, folder. Each rank writes what it got back.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from rollverify.ranks import gather_values, reduce_metrics


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=30)
    )
    # Ranks insert their keys in different orders, and rank 1 has the larger maximum.
    sums = {"b": 10.0, "a": 1.0} if rank == 0 else {"a": 2.0, "b": 20.0}
    reduced = reduce_metrics(sums, {"m": -5.0 + rank})
    only_maxima = reduce_metrics({}, {"m": float(rank)})
    only_sums = reduce_metrics({"a": 0.5}, {})
    try:
        reduce_metrics({f"rank_{rank}": 1.0}, {})
        error = ""
    except RuntimeError as caught:
        error = str(caught)
    # Lists of different lengths: rank 0 has [0, 1] and nothing, rank 1 has [10] and [11, 12, 13].
    rows = [torch.tensor([0.0, 1.0]), torch.zeros(0)]
    if rank == 1:
        rows = [torch.tensor([10.0]), torch.tensor([11.0, 12.0, 13.0])]
    group = dist.group.WORLD
    gathered = [values.tolist() for values in gather_values(rows, group)]
    nothing = [values.tolist() for values in gather_values([torch.zeros(0)], group)]
    result = [reduced, only_maxima, only_sums, error, gathered, nothing]
    (folder / f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
