"""One rank of the test set pass that test_evaluation_ranks.py checks; not a test itself.

Each rank writes its metrics.
"""

import json
from pathlib import Path

from support.fakes import FakeEngine
from unit.evaluation.examples import Answers, encoded, evaluator

from rollverify.evaluation.stage import Evaluation
from rollverify.ranks import Ranks

NUM_PROBLEMS, NUM_SAMPLES = 5, 4
# Lengths of the greedy response and the sampled ones; 6 is the limit.
LENGTHS = [(1, 2, 3, 2, 5), (2, 4, 4, 4, 1), (3, 6, 6, 6, 6), (4, 2, 2, 6, 5), (5, 1, 3, 1, 3)]


def answer_of(text: str) -> str | None:
    """Of every length its own, but of 4 that of 2, and of a response that was cut none."""
    return {6: None, 4: "two", 2: "two"}.get(len(text), f"{len(text)} tokens")


def evaluate(rank: int, world_size: int, num_problems: int = NUM_PROBLEMS) -> dict[str, float]:
    """Metrics of this rank's share; an even length is right."""
    stops = {
        f"eval/{index}/{sample}": length
        for index, lengths in enumerate(LENGTHS)
        for sample, length in enumerate(lengths)
        if length < 6
    }
    share = evaluator(
        FakeEngine(stop_after=stops),
        encoded(num_problems, lambda ids: float(len(ids) % 2 == 0)),
        Answers(rank, answer_of),  # Threads on one of them.
        samples_per_problem=NUM_SAMPLES,
        max_response_tokens=6,
    )
    ranks = Ranks(rank=rank, size=world_size)
    return Evaluation(evaluator=share, ranks=ranks, last_step=1).run(0)


def main(rank: int, world_size: int, folder: Path) -> None:
    results = {
        "shares": evaluate(rank, world_size),
        "nothing on rank 1": evaluate(rank, world_size, num_problems=1),
        # As tensor ranks do, which work on the same problems.
        "twice": evaluate(0, 1),
    }
    (folder / f"{rank}.json").write_text(json.dumps(results))
