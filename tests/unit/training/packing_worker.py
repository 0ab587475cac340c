"""One rank of the step that test_packing.py checks; not a test itself.

Arguments: rank, world size, folder. Each rank writes its rows, its metrics and the summed gradient.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
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


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=30)
    )
    result = one_step(SHARES[rank], dist.group.WORLD)
    (folder / f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
