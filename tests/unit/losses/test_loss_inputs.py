"""What all losses share: checks of a row, sequence statistics, diagnostics, the KL penalty."""

import math
from dataclasses import replace

import pytest
import torch
from unit.losses import correction_reference as reference
from unit.losses.loss_examples import (
    ADVANTAGES,
    KL_EXAMPLES,
    KL_EXPECTED,
    KL_P,
    KL_Q,
    LP_NEW,
    LP_OLD,
    LP_ROLL,
    MASK,
)
from unit.losses.loss_rows import correct, flat, loss_inputs, random_rows

from rollverify.losses.diagnostics import (
    RATIO_BUCKETS,
    RATIO_EDGES,
    effective_sample_frac,
    engine_mismatch,
    kl_penalty,
    ratio_histogram,
    step_diagnostics,
)
from rollverify.losses.inputs import check_finite, sequence_means, sequence_sums

MASK_ROW = flat(MASK, torch.bool)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_named(value):
    row = torch.tensor([-1.0, value, value])
    check_finite(torch.tensor([True, False, False]), policy_logprobs=row)
    with pytest.raises(ValueError, match=rf"anchor\[1\] is {value} inside loss_mask"):
        check_finite(torch.tensor([True, True, False]), policy=-torch.ones(3), anchor=row)


def test_sequence_statistics_leave_masked_positions_out():
    values, mask = torch.tensor([1.0, 2.0, 0.0, 5.0, 0.0]), torch.tensor([1, 1, 0, 1, 0]).bool()
    inputs = replace(
        loss_inputs(*[[[0.0] * 5]] * 3, [0.0], [[0] * 5]),
        loss_mask=mask,
        sequence_ids=torch.tensor([1, 1, 1, 0, -1]),
        num_sequences=3,
    )
    sums, index = sequence_sums(values, inputs)
    assert sums.tolist() == [5.0, 3.0, 0.0] and index.tolist() == [1, 1, 0, 0, 0]
    assert sequence_means(values, inputs)[0].tolist() == [5.0, 1.5, 0.0]


def test_diagnostics_have_the_worked_values():
    inputs = loss_inputs(LP_NEW, LP_OLD, LP_ROLL, ADVANTAGES, MASK)
    found = step_diagnostics(inputs, correct("truncated", LP_OLD, LP_ROLL, MASK))
    expected = {
        "ratio": [1.127497, 1.491825, 0.951229, 0.670320, 1.349859],
        # exp(d) - 1 - d with d = 0.12, 0.4, -0.05, -0.4, 0.3.
        "kl": [0.007497, 0.091825, 0.001229, 0.070320, 0.049859],
        "correction_weight": [0.980199, 2.0, 0.951229, 1.105171, 0.860708],
        "correction_weight_squared": [0.960789, 4.0, 0.904837, 1.221403, 0.740818],
        "is_truncated": [0, 1, 0, 0, 0],
        "is_correction_masked": [0, 0, 0, 0, 0],
    }
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].tolist() == pytest.approx([*values, 0.0], abs=1e-6), name
        assert not found[name].requires_grad


def test_engine_mismatch_has_the_worked_values():
    found = engine_mismatch(flat(LP_OLD), flat(LP_ROLL), MASK_ROW)
    assert found["mismatch_abs"].tolist() == pytest.approx([0.02, 0.8, 0.05, 0.1, 0.15, 0.0])
    # exp(d) - 1 - d with d = -0.02, 0.8, -0.05, 0.1, -0.15.
    right = [0.000199, 0.425541, 0.001229, 0.005171, 0.010708, 0.0]
    assert found["mismatch_k3"].tolist() == pytest.approx(right, abs=1e-6)
    drift = reference.drift_kl(LP_OLD, LP_ROLL, MASK)
    assert found["mismatch_k3"].sum().item() / 5 == pytest.approx(drift, abs=1e-12)


def test_histogram_counts_every_token_in_the_mask_once():
    assert len(RATIO_BUCKETS) == len(RATIO_EDGES) + 1
    ratio = torch.tensor([0.0, 0.49, 0.5, 0.79, 0.95, 1.0, 1.05, 1.9, 2.0, 5e8, 1.0])
    mask = torch.tensor([True] * 10 + [False])
    # [0, 0.49], [0.5, 0.79], none in [0.8, 0.95), [0.95, 1.0], [1.05], [1.9], [2.0, 5e8]
    assert ratio_histogram(ratio, mask).tolist() == [2, 2, 0, 2, 1, 1, 2]


@pytest.mark.parametrize(
    ("weights", "share"),
    [
        ([1, 1, 1], 1.0),
        ([1, 1, 0, 0], 0.5),
        ([1, 3, 0], 16 / 30),  # 4^2 / (3 * 10)
        ([0, 0], 0.0),
        ([], 0.0),
    ],
)
def test_effective_sample_size_by_hand(weights, share):
    squares = sum(weight * weight for weight in weights)
    assert effective_sample_frac(sum(weights), squares, len(weights)) == pytest.approx(share)


def test_effective_sample_size_is_that_of_the_transcription():
    _, denominator, behavior, _, mask = random_rows(3)
    weights = reference.truncated_token(denominator, behavior, mask)
    inside = flat(weights)[flat(mask, torch.bool)]
    found = effective_sample_frac(inside.sum().item(), inside.square().sum().item(), len(inside))
    assert found == pytest.approx(reference.effective_sample_size(weights, mask), abs=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_is_the_worked_one(estimator):
    found = kl_penalty(flat(LP_NEW), flat(LP_OLD), MASK_ROW, estimator)
    right = [*KL_EXAMPLES[estimator][0], *KL_EXAMPLES[estimator][1], 0.0]
    assert found.tolist() == pytest.approx(right, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_expectation_of_the_kl_estimators(estimator):
    p, q = torch.tensor(KL_P), torch.tensor(KL_Q)
    values = kl_penalty(p.log(), q.log(), torch.ones(3).bool(), estimator)
    assert (p * values).sum().item() == pytest.approx(KL_EXPECTED[estimator], abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("seed", range(5))
def test_kl_and_its_gradient_are_those_of_the_transcription(estimator, seed):
    policy, other, _, _, mask = random_rows(seed, spread=2.0)
    ours = flat(policy).requires_grad_()
    kl_penalty(ours, flat(other), flat(mask, torch.bool), estimator).sum().backward()
    inside = flat(mask, torch.bool)
    theirs = flat(policy).requires_grad_()
    pairs = zip(theirs[inside], flat(other)[inside], strict=True)
    sum(reference.kl(one, float(two), estimator) for one, two in pairs).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-9, rtol=0)


def test_kl_stays_finite_and_out_of_the_mask():
    policy = torch.tensor([100.0, -100.0, math.nan], requires_grad=True)
    reference_row = torch.tensor([0.0, 0.0, -math.inf])
    mask = torch.tensor([True, True, False])
    for estimator in ("k1", "k2", "k3"):
        penalty = kl_penalty(policy, reference_row, mask, estimator)
        (gradient,) = torch.autograd.grad(penalty.sum(), policy)
        assert penalty.isfinite().all() and penalty[2] == 0.0
        assert gradient.isfinite().all() and gradient[2] == 0.0


def test_kl_refuses_a_reference_that_is_not_finite():
    with pytest.raises(ValueError, match=r"reference_logprobs\[0\] is nan"):
        kl_penalty(flat(LP_NEW), flat(LP_OLD) * math.nan, MASK_ROW)
