"""Importance weights and masks: an independent transcription, worked weights, bad settings."""

import math

import pytest
import torch
from unit.losses import correction_reference as reference
from unit.losses.loss_examples import (
    ADVANTAGES,
    FAULT_CASES,
    LP_NEW,
    LP_OLD,
    LP_ROLL,
    MASK,
    SEQUENCE_PRODUCTS,
    TIS_WEIGHTS,
)
from unit.losses.loss_rows import correct, flat, random_rows

from rollverify.config.losses import CORRECTIONS

PRODUCTS = [SEQUENCE_PRODUCTS[0]] * 3 + [SEQUENCE_PRODUCTS[1]] * 2
MASK_ROW = flat(MASK, torch.bool)

CASES = {
    "truncated_token": ("truncated", {"threshold": 1.1}, {"cap": 1.1}),
    "truncated_sequence": (
        "truncated",
        {"level": "sequence", "threshold": 1.5},
        {"cap": 1.5},
    ),
    "masked_token": ("masked", {"low": 0.8, "high": 1.25}, {"bounds": (0.8, 1.25)}),
    "masked_sequence": (
        "masked",
        {"level": "sequence", "low": 0.5, "high": 2.0},
        {"bounds": (0.5, 2.0)},
    ),
    "icepop": ("icepop", {"low": 0.7, "high": 1.3}, {"alpha": 0.7, "beta": 1.3}),
    "geometric_mask": ("geometric_mask", {"low": 0.9, "high": 1.1}, {"bounds": (0.9, 1.1)}),
}
"""By the reference's name: correction, our settings, the reference's."""


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_transcription(case):
    name, ours, theirs = CASES[case]
    num_masked = 0
    for seed in range(20):
        _, denominator, behavior, _, mask = random_rows(seed)
        inside = flat(mask, torch.bool)
        correction = correct(name, denominator, behavior, mask, **ours)
        right = flat(reference.CORRECTIONS[case](denominator, behavior, mask, **theirs))
        torch.testing.assert_close(correction.weights[inside], right[inside], atol=1e-12, rtol=0)
        assert torch.equal(correction.is_masked[inside], right[inside] == 0)
        num_masked += int(correction.is_masked[inside].sum())
    assert (num_masked > 0) == (name != "truncated")


def test_opsm_is_that_of_the_transcription():
    for seed in range(20):
        policy, _, behavior, advantages, mask = random_rows(seed)
        right = flat(reference.off_policy_sequence_mask(policy, behavior, advantages, mask))
        correction = correct("opsm", behavior, behavior, mask, policy=policy, advantages=advantages)
        inside = flat(mask, torch.bool)
        assert torch.equal(correction.weights[inside], right[inside])


def test_truncated_weights_are_the_worked_ones():
    correction = correct("truncated", LP_OLD, LP_ROLL, MASK)
    assert correction.weights[:5].tolist() == pytest.approx(flat(TIS_WEIGHTS).tolist(), abs=1e-6)
    assert correction.is_truncated.tolist() == [False, True, False, False, False, False]
    by_sequence = correct("truncated", LP_OLD, LP_ROLL, MASK, level="sequence", threshold=math.inf)
    assert by_sequence.weights[:5].tolist() == pytest.approx(PRODUCTS, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "settings", "right"),
    [
        # Products 2.075081 and 0.951229; geometric means exp(0.73 / 3) and exp(-0.05 / 2).
        ("truncated", {"level": "sequence"}, [[2.0] * 3, [0.951229] * 2]),
        ("masked", {}, [[0.980199, 0.0, 0.951229], [1.105171, 0.860708]]),
        ("masked", {"low": 0.9, "high": 3.0}, [[0.980199, 2.225541, 0.951229], [1.105171, 0.0]]),
        ("masked", {"low": 1 / 1.15, "high": 1.15}, [[0.980199, 0, 0.951229], [1.105171, 0]]),
        ("geometric_mask", {}, [[0.0] * 3, [0.0] * 2]),
        ("geometric_mask", {"low": 0.97}, [[0.0] * 3, [1.0] * 2]),
        ("geometric_mask", {"low": 0.97, "high": 1.27}, [[0.0] * 3, [1.0] * 2]),
        ("geometric_mask", {"low": 0.97, "high": 1.28}, [[1.0] * 3, [1.0] * 2]),
    ],
)
def test_weights_of_the_common_example(name, settings, right):
    correction = correct(name, LP_OLD, LP_ROLL, MASK, **settings)
    assert correction.weights[:5].tolist() == pytest.approx(flat(right).tolist(), abs=1e-6)


@pytest.mark.parametrize(("delta", "weight"), [(1e-4, 0.0), (0.06, 1.0)])
def test_opsm_has_the_worked_weights(delta, weight):
    # Second trajectory: mean of (-0.70 + 1.10, -1.60 + 1.30) = 0.05; the first has A > 0.
    words = {"policy": LP_NEW, "advantages": ADVANTAGES, "delta": delta}
    found = correct("opsm", LP_OLD, LP_OLD, MASK, **words).weights[:5]
    assert found.tolist() == [1.0, 1.0, 1.0, weight, weight]


def test_icepop_drops_nothing_inside_its_default_band():
    # The largest rho is 2.2255: inside [0.5, 5], outside [0.5, 2].
    assert not correct("icepop", LP_OLD, LP_ROLL, MASK).is_masked.any()
    narrow = correct("icepop", LP_OLD, LP_ROLL, MASK, high=2.0)
    assert narrow.is_masked.tolist() == [False, True, False, False, False, False]


def test_masked_by_sequence_drops_the_whole_trajectory():
    # Products 2.075081 and 0.951229, band [0.5, 2]; inside it the weight is the product.
    correction = correct("masked", LP_OLD, LP_ROLL, MASK, level="sequence")
    assert correction.weights[:5].tolist() == pytest.approx([0, 0, 0, 0.951229, 0.951229], abs=1e-6)


def test_old_tokens_are_dropped():
    ages = [[3, 2, 1], [1, 0, 9]]
    correction = correct("mask_stale", LP_OLD, LP_ROLL, MASK, ages=ages)
    assert correction.weights.tolist() == [0, 0, 1, 1, 1, 0]
    assert correct("mask_stale", LP_OLD, LP_ROLL, MASK, ages=ages, max_age=0).weights.sum() == 1
    right = flat(reference.mask_old_tokens([[0, 1, 2], [2, 3, 0]], MASK, current_version=3))
    at_zero = correct("mask_stale", LP_OLD, LP_ROLL, MASK, ages=ages, max_age=0).weights
    assert torch.equal(at_zero[MASK_ROW], right[MASK_ROW].double())


def test_ir07_large_weights_are_truncated_not_dropped():
    """IR07: exp(0.7) = 2.013753 is cut to 2, exp(-1.5) = 0.223130 stays; no gradient."""
    case = FAULT_CASES["IR07"]
    correction = correct("truncated", [case.inputs["log_ratios"]], [[0.0, 0.0]], [[1, 1]])
    assert correction.weights.tolist() == pytest.approx(case.right["weights"], abs=1e-6)


def test_ir05_the_form_of_a_sequence_weight():
    """IR05: 1,000 tokens of 0.01 nats; "sequence" is the product, the geometric mask the mean."""
    rows = ([[0.01] * 1000], [[0.0] * 1000], [[1] * 1000])
    product = correct("truncated", *rows, level="sequence", threshold=math.inf)
    assert product.weights[0].item() == pytest.approx(22026.47, abs=0.01)
    # The mean is 1.010050: above 1.01, inside 1.0101.
    assert correct("geometric_mask", *rows).is_masked.all()
    assert not correct("geometric_mask", *rows, high=1.0101).is_masked.any()


@pytest.mark.parametrize("filler", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_ir03_masked_positions_are_not_read(name, filler):
    """IR03."""
    rows = ([[-1.0, -2.0, filler]], [[-1.0, -2.0, filler]], [[1, 1, 0]])
    read = {"policy": rows[0], "advantages": [-1.0]}
    for level in [{"level": "sequence"}, {}] if name in ("truncated", "masked") else [{}]:
        assert correct(name, *rows, **read, **level).weights.tolist()[:2] == [1.0, 1.0]
        assert correct(name, *rows, **read, **level).weights.isfinite().all()


@pytest.mark.parametrize("difference", [100.0, -100.0])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_ir01_extreme_ratios_stay_finite(name, difference):
    """IR01."""
    rows = ([[difference] * 3], [[0.0] * 3], [[1, 1, 1]])
    correction = correct(name, *rows, policy=[[difference] * 3], advantages=[-1.0])
    assert correction.weights.isfinite().all()
    for level in ("token", "sequence"):  # exp(20) = 485165195.4; sums of 60 are clamped again
        uncapped = correct("truncated", *rows, threshold=math.inf, level=level).weights[0].item()
        assert uncapped == pytest.approx(math.exp(math.copysign(20.0, difference)), rel=1e-9)


def test_opsm_spares_good_responses_and_small_shifts():
    rows = ([[0.0, 0.0], [0.0, 0.0]], [[-1.0, -1.0], [-1.0, -1.0]], [[1, 1], [1, 1]])
    # log behavior - log policy is 0.2 on average in the first trajectory, 0 in the second.
    policy = [[-1.4, -1.0], [-1.0, -1.0]]
    dropped = correct("opsm", *rows, policy=policy, advantages=[-1.0, -1.0], delta=0.19)
    assert dropped.weights.tolist() == [0, 0, 1, 1]
    good = correct("opsm", *rows, policy=policy, advantages=[1.0, 1.0], delta=0.19)
    assert good.weights.tolist() == [1, 1, 1, 1]
    assert correct("opsm", *rows, policy=policy, advantages=[-1.0, 1.0], delta=0.21).weights.all()
