"""The test set pass on two ranks is that of one rank, to the last bit and on each of them."""

import json

import pytest
from unit.evaluation import evaluation_worker
from unit.evaluation.evaluation_worker import evaluate


@pytest.mark.distributed
def test_two_ranks_evaluate_as_one_does(run_gloo_workers):
    folder = run_gloo_workers(evaluation_worker.main, 2)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1]
    assert ranks[0]["shares"] == ranks[0]["twice"] == evaluate(0, 1)
    assert ranks[0]["nothing on rank 1"] == evaluate(0, 1, num_problems=1)


def test_the_case_has_different_problems_on_each_rank():
    """Else the comparison above would compare nothing."""
    metrics = evaluate(0, 1)
    # Right of four: 2, 3, 4, 3, 0.
    assert metrics["eval/mean_at_4"] == 12 / 20
    assert metrics["eval/pass_at_4"] == 4 / 5
    # Problem 0: "two", right. 1: "two", right. 2: nobody votes. 3: "two", right. 4: two odd ones.
    assert metrics["eval/maj_at_4"] == 3 / 5
    assert 0.2 < metrics["eval/mean_at_4_low"] < 0.5 < 0.7 < metrics["eval/mean_at_4_high"]
