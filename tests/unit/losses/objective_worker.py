"""One rank of the steps that test_objective_ranks.py checks; not a test itself.

Rank 0 writes the parameters and metrics of every objective.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from support.fakes import ScoringTrainer
from unit.losses.objective_cases import OBJECTIVES, RANK_CASES, stale_batch, take_step

from rollverify.ranks import Ranks


class SummingTrainer(ScoringTrainer):
    """Adds the gradients of all ranks."""

    def optimizer_step(self, *, is_last: bool = True) -> tuple[float, float]:
        if self.logits.grad is None:
            self.logits.grad = torch.zeros_like(self.logits)
        dist.all_reduce(self.logits.grad)
        return super().optimizer_step(is_last=is_last)


def main(rank: int, world_size: int, folder: Path) -> None:
    # Groups go round the ranks, but the last rank has one less than its share.
    owners = [min(one, 6) % world_size for one in range(8)]
    finished = [one for one in stale_batch() if owners[int(one["group_id"])] == rank]
    results = []
    for name, changes in RANK_CASES:
        trainer = SummingTrainer()
        metrics = take_step(
            trainer,
            finished,
            OBJECTIVES[name],
            ranks=Ranks.of(dist.group.WORLD),
            micro_batch_tokens=20,
            **changes,
        )
        results.append((trainer.logits.detach(), metrics))
    if rank == 0:
        torch.save(results, folder / "results.pt")
