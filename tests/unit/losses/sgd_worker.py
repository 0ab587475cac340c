"""One rank of the data-parallel SGD step that test_aggregation.py checks; not a test itself.

Rank 0 writes the parameter after one step per mode.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist

from rollverify.losses.aggregation import BatchCounts, Normalizer, count_batch
from rollverify.ranks import Ranks

# Four sequences of 3 + 1 + 2 + 2 = 8 tokens; token loss = parameter * input.
SEQUENCES = ([1.0, 2.0, 3.0], [4.0], [5.0, 6.0], [7.0, 8.0])
MODES = ("token_mean", "sequence_mean", "constant_length")


def step(mode: str, own: list[list[float]]) -> float:
    """The parameter, from 0, after one SGD step with learning rate 1."""
    lengths = torch.tensor([len(sequence) for sequence in own], dtype=torch.int64)
    counts = BatchCounts(*Ranks.world().sum_counts(count_batch(lengths)))
    normalizer = Normalizer(mode=mode, counts=counts, constant_length=3)
    parameter = torch.zeros((), requires_grad=True)
    for sequence in own:  # One micro-batch each; gradients add up in parameter.grad.
        inputs = torch.tensor(sequence)
        weights = normalizer.token_weights(
            torch.ones_like(inputs, dtype=torch.bool), torch.zeros_like(inputs, dtype=torch.int64)
        )
        (parameter * inputs * weights).sum().backward()
    dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
    return (parameter - parameter.grad).item()


def main(rank: int, world_size: int, folder: Path) -> None:
    own = [list(sequence) for sequence in SEQUENCES[rank::world_size]]
    parameters = {mode: step(mode, own) for mode in MODES}
    if rank == 0:
        (folder / "parameters.json").write_text(json.dumps(parameters))
