"""One rank of the partial rollouts that test_rank_exchange.py checks; not a test itself.

Each rank writes what it saw in each of its phases.
"""

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from support.fakes import FakeEngine, trajectory
from support.rollout_parts import Parts, make_parts, names

from rollverify.config.tables import DynamicSamplingConfig
from rollverify.errors import EngineFailedError, NoSignalError, RolloutError
from rollverify.ranks import Ranks
from rollverify.rollout.trajectory import num_tokens, validate_trajectory
from rollverify.rollout.twins import Twins

NUM_PHASES = 8
GROUPS_PER_STEP = 4


def lengths() -> dict[str, int]:
    """Responses of 3 to 40 tokens; the groups of rank 1 are much longer than those of rank 0."""
    return {
        f"{group}/{sample}": 3 + (7 * group + 5 * sample) % 11 + 26 * (group % 2)
        for group in range(200)
        for sample in range(2)
    }


def ranks_of(world_size: int) -> Ranks:
    return Ranks.of(dist.group.WORLD if world_size > 1 else None)


def phases(world_size: int) -> list[dict[str, Any]]:
    """What each phase trained on, left over and counted."""
    parts = make_parts(
        FakeEngine(stop_after=lengths()),
        group_size=2,
        prompts_per_step=GROUPS_PER_STEP,
        num_in_flight=12 // world_size,
        count_every=3,
        ranks=ranks_of(world_size),
    )
    seen: list[dict[str, Any]] = []
    for version in range(NUM_PHASES):
        finished, unfinished = parts.collect(version)
        parts.rollouter.mark_trained()
        parts.check()
        for one in finished:
            validate_trajectory(one)
        seen.append(
            {
                "finished": names(finished),
                "unfinished": names(unfinished),
                "tokens": sum(map(num_tokens, finished)),
                "steps": parts.engine.num_steps,
                "num_added": parts.ledger.num_added,
                "trained": parts.ledger.counts()["trained"],
                "held": len(parts.buffer.group_ids()),
                "held_tokens": sum(map(num_tokens, unfinished)),
            }
        )
    return seen


def failure(rank: int) -> str:
    """What a rank is told when the engine of rank 1 fails twice."""
    parts = make_parts(
        FakeEngine(stop_after=lengths()),
        count_every=4,
        ranks=ranks_of(2),
    )
    if rank == 1:
        parts.engine.failures = [RuntimeError("first"), RuntimeError("second")]
    try:
        parts.collect(0)
    except EngineFailedError as error:
        return str(error)
    return "no error"


def is_silent(group: int) -> bool:
    """Groups whose two responses have equal lengths, and so rewards: mostly those of rank 1."""
    return (group % 2 == 1 and group % 6 != 1) or group % 10 == 0


def dynamic_parts(world_size: int, max_given_up: int = 100, **changes: Any) -> Parts:
    """Dynamic sampling of groups of two, 5 tokens or 3 and 5."""
    stop_after = {
        f"{g}/{s}": 5 if s or is_silent(g) else 3 + (g % 7) * 9 for g in range(300) for s in (0, 1)
    }
    rule = DynamicSamplingConfig(enable=True, max_dropped_batches=max_given_up / GROUPS_PER_STEP)
    settings = {"prompts_per_step": GROUPS_PER_STEP, "num_in_flight": 12 // world_size} | changes
    return make_parts(
        FakeEngine(stop_after=stop_after),
        group_size=2,
        ranks=ranks_of(world_size),
        dynamic_sampling=rule,
        **settings,
    )


def dynamic_phases(world_size: int, **changes: Any) -> list[dict[str, Any]]:
    """What each phase trained on and gave up."""
    parts = dynamic_parts(world_size, **changes)
    seen: list[dict[str, Any]] = []
    for version in range(NUM_PHASES):
        finished, _ = parts.collect(version)
        parts.rollouter.mark_trained()
        parts.check()
        assert parts.rollouter.given_up is not None
        seen.append(
            {
                "finished": names(finished),
                "given_up": parts.rollouter.given_up.num_groups,
                "filtered": parts.ledger.counts()["filtered"],
                "steps": parts.engine.num_steps,
            }
        )
    return seen


def no_signal() -> str:
    """What a rank is told when the two ranks together give up too many groups."""
    try:
        for version in range(NUM_PHASES):
            dynamic_parts(2, max_given_up=2, is_on_policy=True).collect(version)
    except NoSignalError as error:
        return str(error)
    return "no error"


def twins(rank: int) -> list[str]:
    """What two ranks of one tensor-parallel group are told, with equal and with other tokens."""
    told = []
    for response in ([5, 6], [5, 6 + rank]):
        try:
            Twins(ranks=Ranks.world()).check([trajectory([1], response)])
            told.append("")
        except RolloutError as error:
            told.append(str(error))
    return told


def main(rank: int, world_size: int, folder: Path) -> None:
    result = {
        "phases": phases(world_size),
        "failure": failure(rank),
        "twins": twins(rank),
        "on_policy": dynamic_phases(world_size, is_on_policy=True),
        "partial": dynamic_phases(world_size, count_every=3),
        "no_signal": no_signal(),
    }
    (folder / f"{rank}.json").write_text(json.dumps(result))
