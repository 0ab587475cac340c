"""Claims: when they hold, when they do not, and when nothing can be said."""

import pytest
from unit.study.folders import records, study

from rollverify.study.claims import judge
from rollverify.study.results import collect

PAIR = {"arm": "rollverify", "other": "on_policy"}


def verdict(tmp_path, accuracies, claim, **changes):
    made = study(claims=[{"text": "t", **claim}])
    return judge(made.claims[0], collect(made, records(tmp_path, accuracies, **changes)))


@pytest.mark.parametrize(
    ("ours", "held"), [((0.1, 0.59), True), ((0.1, 0.6), False), ((0.1, 0.9), False), ((), None)]
)
def test_below_means_every_seed_below_every_seed(tmp_path, ours, held):
    accuracies = {"on_policy": (0.6, 0.8), "rollverify": ours}
    found = verdict(tmp_path, accuracies, {"kind": "accuracy_below", **PAIR})
    assert found.held is held


@pytest.mark.parametrize(("ours", "held"), [((0.5, 0.7), True), ((0.5, 0.69), False)])
def test_within_the_spread_means_not_below_the_lowest_seed(tmp_path, ours, held):
    accuracies = {"on_policy": (0.6, 0.8), "rollverify": ours}
    found = verdict(tmp_path, accuracies, {"kind": "accuracy_within_spread", **PAIR})
    assert found.held is held
    assert found.detail.startswith(f"0.500 / {ours[1]:.3f} against 0.600 / 0.800; difference")


@pytest.mark.parametrize(("factor", "held"), [(2.0, True), (2.1, False)])
def test_decode_steps_by_the_factor(tmp_path, factor, held):
    claim = {"kind": "fewer_decode_steps", "factor": factor, **PAIR}
    accuracies = {"on_policy": (0.5,), "rollverify": (0.5,)}
    found = verdict(tmp_path, accuracies, claim, rollout__decode_steps=5.0)
    assert found.held is held and found.detail == "15 against 30: 2.00 x fewer"


@pytest.mark.parametrize(("factor", "held"), [(1.5, True), (1.51, False)])
def test_cost_by_the_factor(tmp_path, factor, held):
    # 10 + 0.25 * 20 = 15 against 5 + 0.25 * 20 = 10
    claim = {"kind": "cheaper", "factor": factor, "ratio": 0.25, **PAIR}
    accuracies = {"on_policy": (0.5,), "rollverify": (0.5,)}
    found = verdict(tmp_path, accuracies, claim, rollout__decode_steps=5.0)
    assert found.held is held and found.detail == "1.50 x cheaper at c1 / c0 = 0.25"


@pytest.mark.parametrize(("ops", "held"), [(0.011, True), (0.01, False), (0.0, False)])
def test_ops_fall_from_arm_to_arm(tmp_path, ops, held):
    claim = {"kind": "ops_order", "arms": ["rollverify", "on_policy"]}
    accuracies = {"on_policy": (0.5,), "rollverify": (0.5,)}
    found = verdict(tmp_path, accuracies, claim, ops__trained_sequence_mean=ops)
    assert found.held is held


@pytest.mark.parametrize("kind", ["fewer_decode_steps", "cheaper", "ops_order"])
def test_without_complete_runs_nothing_is_decided(tmp_path, kind):
    claim = {"kind": kind, **PAIR, "factor": 1.0}
    claim |= {"ratio": 0.1} if kind == "cheaper" else {}
    if kind == "ops_order":
        claim = {"kind": kind, "arms": ["rollverify", "on_policy"]}
    accuracies = {"on_policy": (0.5,), "rollverify": (0.5,)}
    found = verdict(tmp_path, accuracies, claim, num_steps=2, has_final=False)
    assert found.held is None
