"""One rank of the reduction that test_reduction.py checks; not a test itself.

Each rank writes what it got back.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist

from rollverify.ranks import Ranks

PARCEL = [
    {"flags": torch.tensor([True, False, True]), "number": torch.tensor(2**40)},
    {},
    {"experts": torch.arange(24, dtype=torch.uint8).view(2, 3, 4).transpose(0, 2)},
    {"nothing": torch.zeros(0), "nan": torch.tensor([1.5, float("inf")])},
]
"""Types whose bytes do not line up, no values, a tensor that is not contiguous."""


def main(rank: int, world_size: int, folder: Path) -> None:
    ranks = Ranks.of(dist.group.WORLD)
    # Ranks insert their keys in different orders, and rank 1 has the larger maximum.
    sums = {"b": 10.0, "a": 1.0} if rank == 0 else {"a": 2.0, "b": 20.0}
    reduced = ranks.reduce(sums, {"m": -5.0 + rank})
    only_maxima = ranks.reduce({}, {"m": float(rank)})
    only_sums = ranks.reduce({"a": 0.5}, {})
    try:
        ranks.reduce({f"rank_{rank}": 1.0}, {})
        error = ""
    except RuntimeError as caught:
        error = str(caught)
    # Lists of different lengths: rank 0 has [0, 1] and nothing, rank 1 has [10] and [11, 12, 13].
    rows = [torch.tensor([0.0, 1.0]), torch.zeros(0)]
    if rank == 1:
        rows = [torch.tensor([10.0]), torch.tensor([11.0, 12.0, 13.0])]
    gathered = [values.tolist() for values in ranks.join(rows)]
    nothing = [values.tolist() for values in ranks.join([torch.zeros(0)])]
    if rank == 0:
        ranks.send(PARCEL, 1)
    else:
        received = ranks.receive(0)
        assert [item.keys() for item in received] == [item.keys() for item in PARCEL]
        for got, want in zip(received, PARCEL, strict=True):
            for name, tensor in want.items():
                assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name
    result = [reduced, only_maxima, only_sums, error, gathered, nothing]
    (folder / f"{rank}.json").write_text(json.dumps(result))
