"""Claims: when they hold, when they do not, and when nothing can be said."""

import pytest
from unit.study.folders import records, study

from rollverify.study.claims import judge
from rollverify.study.results import collect

PAIR = {"arm": "rollverify", "other": "on_policy"}
BELOW = {"kind": "accuracy_below", **PAIR}
WITHIN = {"kind": "accuracy_within_spread", **PAIR}
STEPS = {"kind": "fewer_decode_steps", **PAIR}
CHEAPER = {
    "kind": "cheaper",
    "ratio": 0.25,
    **PAIR,
}  # 10 + 0.25 * 20 = 15 against 5 + 0.25 * 20 = 10
OPS = {"kind": "ops_order", "arms": ["rollverify", "on_policy"]}


def verdict(tmp_path, claim, ours=(0.5, 0.5), **changes):
    made = study(claims=[{"text": "t", **claim}])
    found = records(tmp_path, {"on_policy": (0.6, 0.8), "rollverify": ours}, **changes)
    return judge(made.claims[0], collect(made, found))


@pytest.mark.parametrize(
    ("claim", "ours", "held"),
    [
        (BELOW, (0.1, 0.59), True),
        (BELOW, (0.1, 0.6), False),  # every seed below every seed
        (BELOW, (), None),
        (WITHIN, (0.5, 0.7), True),  # the mean not below the lowest seed
        (WITHIN, (0.5, 0.69), False),
    ],
)
def test_accuracies(tmp_path, claim, ours, held):
    found = verdict(tmp_path, claim, ours)
    assert found.held is held
    assert held is None or found.detail.startswith(
        f"{ours[0]:.3f} / {ours[1]:.3f} against 0.600 / 0.800; difference of means -0."
    )


@pytest.mark.parametrize(
    ("claim", "held", "detail"),
    [
        ({**STEPS, "factor": 2.0}, True, "15 against 30: 2.00 x fewer"),
        ({**STEPS, "factor": 2.1}, False, "15 against 30: 2.00 x fewer"),
        ({**CHEAPER, "factor": 1.5}, True, "1.50 x cheaper at c1 / c0 = 0.25"),
        ({**CHEAPER, "factor": 1.51}, False, "1.50 x cheaper at c1 / c0 = 0.25"),
    ],
)
def test_cost_by_the_factor(tmp_path, claim, held, detail):
    found = verdict(tmp_path, claim, rollout__decode_steps=5.0)
    assert (found.held, found.detail) == (held, detail)


@pytest.mark.parametrize(("ops", "held"), [(0.011, True), (0.01, False), (0.0, False)])
def test_ops_fall_from_arm_to_arm(tmp_path, ops, held):
    assert verdict(tmp_path, OPS, ops__trained_sequence_mean=ops).held is held


@pytest.mark.parametrize("claim", [BELOW, {**STEPS, "factor": 1}, {**CHEAPER, "factor": 1}, OPS])
def test_without_complete_runs_nothing_is_decided(tmp_path, claim):
    assert verdict(tmp_path, claim, num_steps=2, has_final=False).held is None
