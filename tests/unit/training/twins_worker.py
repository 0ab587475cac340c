"""One of four ranks that test_twins.py checks; not a test itself."""

import json
from pathlib import Path
from typing import Any

from support.fakes import ScoringTrainer, trajectory

from rollverify.engine.model_folder import RoutingShape
from rollverify.ranks import Ranks
from rollverify.rollout.twins import Twins, roll_out_ranks
from rollverify.training.scoring import TrajectoryScorer

LAYOUTS = [(1, 1), (2, 1), (4, 2), (2, 2), (1, 4), (4, 1)]
"""Ranks of an engine, ranks of a tensor-parallel group."""

BATCH = [
    trajectory([1], [2, 3, 4, 5], group=3, sample=0),
    trajectory([1, 2], [], group=3, sample=1),
    trajectory([0], [5], group=4, sample=0),
    trajectory([5, 4], [3, 2, 1], group=4, sample=1),
    trajectory([2], [3, 3], group=9, sample=0),
]
SHAPE = RoutingShape(num_layers=1, experts_per_token=1, num_experts=300)


def scored(twins: Twins, data_ranks: Ranks, batch: list[Any]) -> dict[str, Any]:
    """What the scorer gives of a batch, and how many tokens its trainer was fed for that."""
    trainer = ScoringTrainer()
    scorer = TrajectoryScorer(
        trainer=trainer,
        micro_batch_tokens=64,
        temperature=1.0,
        ranks=data_ranks,
        twins=twins,
        routing=SHAPE,
    )
    scores, routes = scorer.score_and_route(batch)
    return {
        "scores": scores.tolist(),
        "routes": [None if ids is None else ids.tolist() for ids in routes],
        "fed": sum(len(row.tokens) for row in trainer.scored_rows),
    }


def main(rank: int, world_size: int, folder: Path) -> None:
    seen = []
    for engine, tensor in LAYOUTS:
        ranks, twins = roll_out_ranks(engine, tensor, timeout_s=30)
        own = twins.own_groups(BATCH)
        seen.append(
            {
                "ranks": [ranks.world_rank(i) for i in range(ranks.size)],
                "twins": [twins.ranks.world_rank(i) for i in range(twins.ranks.size)],
                "own": [(int(t["group_id"]), int(t["sample_index"])) for t in own],
                # Ranks of one tensor-parallel group have a row each, so no row is missing.
                "batch": scored(twins, Ranks(), BATCH),
                "nothing": scored(twins, Ranks(), BATCH[1:2]),
            }
        )
    (folder / f"{rank}.json").write_text(json.dumps(seen))
