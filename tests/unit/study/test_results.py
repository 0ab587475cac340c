"""Runs by arm, and arms at equal cost."""

import pytest
from unit.study.folders import records, study

from rollverify.study.cost_model import Work
from rollverify.study.records import read_run
from rollverify.study.results import at_equal_cost, collect

BOTH = {"on_policy": (0.6, 0.8), "rollverify": (0.5, 0.75)}


def results(tmp_path, accuracies=BOTH, **changes):
    return collect(study(), records(tmp_path, accuracies, **changes))


def test_runs_are_grouped_by_arm(tmp_path):
    made = results(tmp_path)
    assert made.arms[0].figures["mean_at_k"] == [0.6, 0.8]
    assert [record.seed for record in made.arms[1].records] == [0, 1]
    assert made.arms[1].label == "RollVerify" and made.baseline is made.arms[0]


def test_work_is_the_mean_of_complete_runs(tmp_path):
    made = results(tmp_path, num_steps=2, has_final=False)
    assert made.arms[0].work() == pytest.approx(Work(30, 60, 6))
    assert made.arms[1].work() is None and made.arms[1].values("mean_at_k") == []


def test_a_missing_run_is_named_and_does_not_count(tmp_path):
    found = records(tmp_path, {"rollverify": (0.5,)}, train__entropy_nats=None)
    made = collect(study(), [*found, read_run("rollverify", 1, None)])
    assert made.missing == [
        "rollverify, seed 0 (rollverify): train/entropy_nats is missing or not finite in steps 1-3",
        "rollverify, seed 1: there is no run folder",
    ]
    assert made.arms[1].figures["mean_at_k"] == [0.5, None]
    assert made.arms[1].spread("mean_at_k").num == 1


def test_all_phases_are_fitted_together(tmp_path):
    # 10 steps of 2 s with 2 active in one arm, 5 steps of 2 s with 4 active in the other:
    # 0.2 s = c0 + 2 c1 and 0.4 s = c0 + 4 c1
    fit = results(tmp_path, rollout__decode_steps=5.0).fit
    assert fit is not None and fit.num_phases == 12
    assert (fit.c0_s, fit.c1_s) == pytest.approx((0, 0.1))


def test_arms_are_compared_at_the_cost_of_the_cheapest(tmp_path):
    # At ratio 0.5 a run costs 3 * (10 + 10) = 60, and 3 * (5 + 10) = 45 in arm rollverify. By
    # then on-policy is at 3/4 of the way from 0.25 to 0.6 and 0.8.
    found = at_equal_cost(results(tmp_path, rollout__decode_steps=5.0), 0.5)
    assert found is not None and (found.budget, found.cheapest) == (45, "RollVerify")
    assert found.accuracies["on_policy"] == pytest.approx([0.5125, 0.6625])
    assert found.accuracies["rollverify"] == pytest.approx([0.5, 0.75])


def test_arms_are_compared_by_the_clock(tmp_path):
    # A step takes 4.25 s, and 2 s more where the rollout does; on-policy is the cheapest.
    found = at_equal_cost(results(tmp_path, time__rollout_s=4.5), None)
    assert found is not None
    assert (found.budget, found.cheapest) == (pytest.approx(12.75), "on policy")
    # 12.75 of 18.75 s on the way from 0.25
    assert found.accuracies["rollverify"] == pytest.approx([0.25 + 0.25 * 0.68, 0.25 + 0.5 * 0.68])


def test_nothing_is_compared_without_complete_runs(tmp_path):
    made = results(tmp_path, {"rollverify": (0.5,)}, num_steps=2, has_final=False)
    assert at_equal_cost(made, 0.5) is None
