"""One rank of the step that test_packing.py checks; not a test itself.

Each rank writes its rows, its metrics and the summed gradient.
"""

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from support.fakes import FakeTrainer, trajectory
from tensordict import TensorDict
from unit.training.updates import policy_update

from rollverify.losses.advantages import CreditRule
from rollverify.ranks import Ranks

MAX_TOKENS = 8


def _trajectory(num_fed: int, reward: float, group: int) -> TensorDict:
    """Two prompt tokens; `num_fed` tokens are fed, so `num_fed` - 1 are in the loss."""
    response = [(3 * group + i + int(reward)) % 6 for i in range(num_fed - 1)]
    return trajectory([1, 2], response, reward=reward, group=group)


# Rank 0: one group, 8 fed tokens each. Rank 1: one group, 4 fed tokens each.
SHARES = (
    [_trajectory(8, 1.0, 0), _trajectory(8, 0.0, 0), _trajectory(8, 0.0, 0)],
    [_trajectory(4, 1.0, 1), _trajectory(4, 0.0, 1)],
)


class SummingTrainer(FakeTrainer):
    """Adds the gradients of all ranks."""

    def optimizer_step(self, *, is_last: bool = True) -> tuple[float, float]:
        if dist.is_initialized():
            dist.all_reduce(self.logits.grad)
        return super().optimizer_step(is_last=is_last)


def one_step(finished: list[TensorDict], group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Rows, metrics and gradient of one optimizer step."""
    trainer = SummingTrainer()
    update = policy_update(
        trainer,
        credit=CreditRule(max_response_tokens=16),
        micro_batch_tokens=MAX_TOKENS,
        ranks=Ranks.of(group),
    )
    metrics = update.train_step(finished, 0)
    gradient = trainer.gradient.flatten().tolist()
    return {"num_rows": trainer.num_rows, "metrics": metrics, "gradient": gradient}


def main(rank: int, world_size: int, folder: Path) -> None:
    result = one_step(SHARES[rank], dist.group.WORLD)
    (folder / f"{rank}.json").write_text(json.dumps(result))
