"""One rank of the slot trace that test_slot_trace.py checks; not a test itself.

Arguments: rank, world size, folder.
"""

from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist
from support.fakes import trajectory

from rollverify.hooks import StepState
from rollverify.metrics.json_lines import SlotLog
from rollverify.metrics.rollout import SlotTrace
from rollverify.ranks import Ranks

ACTIVE = ([4, 4, 1], [3])
"""By rank; the second one ends its phase two engine steps earlier."""


def main(rank: int, world_size: int, folder: Path) -> None:
    log = SlotLog(folder, rank=rank)
    stats, ranks = SimpleNamespace(active=ACTIVE[rank]), Ranks.of(dist.group.WORLD)
    rollouter = SimpleNamespace(stats=stats, ranks=ranks)
    state = StepState(step=2, policy_version=1)
    state.finished = [trajectory([0], [1] * (rank + 1), group=rank)]
    SlotTrace(rollouter=rollouter, slot_log=log)(state)
    log.close()
