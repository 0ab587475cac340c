"""The reference transcription against the worked examples: it must be right before it may judge.

Whether the product agrees with the reference is not decided here.
"""

import math

import pytest
import torch
from unit.losses import correction_reference, loss_reference
from unit.losses.loss_examples import (
    ADVANTAGE_EXAMPLES,
    ADVANTAGES,
    CLIP_FRACTIONS,
    ENTROPY_EXAMPLES,
    EXAMPLES,
    FAULT_CASES,
    GSPO_RATIOS,
    KL_EXAMPLES,
    KL_EXPECTED,
    KL_P,
    KL_Q,
    LOG_PROBS,
    LP_NEW,
    LP_OLD,
    LP_ROLL,
    M2_OLD,
    M2PO_KEPT,
    MASK,
    OVERLONG_EXAMPLES,
    RATIOS,
    SAPO_GATES,
    SAPO_SLOPES,
    SEQUENCE_PRODUCTS,
    TIS_WEIGHTS,
    VESPO_KERNELS,
)

TOKENS = [(i, t) for i in range(2) for t in range(3) if MASK[i][t]]
CLOSE = {"abs": 1e-6, "rel": 0.0}


def named(examples):
    return pytest.mark.parametrize("example", examples, ids=lambda example: example.name)


def weights_of(example):
    if example.correction is None:
        return None
    correct = correction_reference.CORRECTIONS[example.correction]
    return correct(LP_OLD, LP_ROLL, MASK, **example.correction_settings)


def run(example):
    """(value, gradient rows) of an example."""
    policy = torch.tensor(LOG_PROBS[example.policy], dtype=torch.float64, requires_grad=True)
    loss = loss_reference.LOSSES[example.loss](
        *(policy, LOG_PROBS[example.denominator], LP_ROLL, ADVANTAGES, MASK),
        weights=weights_of(example),
        aggregation=example.aggregation,
        constant=example.constant,
        **example.settings,
    )
    loss.backward()
    return loss.item(), policy.grad.tolist()


@named(EXAMPLES)
def test_value_is_that_of_the_worked_example(example):
    assert run(example)[0] == pytest.approx(example.value, **CLOSE)


@named([example for example in EXAMPLES if example.gradient is not None])
def test_gradient_is_that_of_the_worked_example(example):
    _, gradient = run(example)
    for row, right in zip(gradient, example.gradient, strict=True):
        assert row == pytest.approx(right, **CLOSE)


@named(EXAMPLES)
def test_the_padded_token_has_exactly_no_gradient(example):
    assert run(example)[1][1][2] == 0.0


@pytest.mark.parametrize(("new", "old", "right"), RATIOS)
def test_ratios_are_those_of_the_worked_example(new, old, right):
    for i, t in TOKENS:
        found = loss_reference.ratio(LOG_PROBS[new], LOG_PROBS[old], i, t)
        assert found.item() == pytest.approx(right[i][t], **CLOSE)


@pytest.mark.parametrize("name", sorted(loss_reference.LOSSES))
def test_at_ratio_one_the_gradient_is_the_plain_policy_gradient(name):
    policy = torch.tensor(LP_OLD, dtype=torch.float64, requires_grad=True)
    batch = (policy, LP_OLD, LP_OLD, ADVANTAGES, MASK)
    loss_reference.LOSSES[name](*batch, aggregation="token_mean").backward()
    # -A / 5 tokens
    right = torch.tensor([[-0.2, -0.2, -0.2], [0.2, 0.2, 0.0]], dtype=torch.float64)
    assert torch.allclose(policy.grad, right, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("shift", [100.0, -100.0])
@pytest.mark.parametrize("name", sorted(loss_reference.LOSSES))
def test_extreme_log_ratios_stay_finite(name, shift):
    policy = torch.tensor(LP_OLD, dtype=torch.float64) + shift
    policy.requires_grad_()
    batch = (policy, LP_OLD, LP_ROLL, ADVANTAGES, MASK)
    loss = loss_reference.LOSSES[name](*batch, aggregation="token_mean")
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(policy.grad).all()


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_sequence_ratio_of_gspo_is_bounded(name):
    # -A exp(10), not clipped for a negative advantage
    loss = loss_reference.LOSSES[name]([[100.0]], [[0.0]], [[0.0]], [-1.0], [[1]])
    assert loss.item() == pytest.approx(math.exp(10.0))


def test_sequence_product_of_vespo_is_bounded():
    # tokens clamped to 20 each, their sum of 40 to 20 again
    batch = loss_reference.Batch([[100.0, 100.0]], [[0.0, 0.0]], None, [1.0], [[1, 1]], None)
    assert loss_reference.vespo_w(batch, 0).item() == pytest.approx(math.exp(20.0))


def test_sequence_ratios_of_gspo():
    for i, right in enumerate(GSPO_RATIOS):
        log_s = loss_reference.mean_log_ratio(LP_NEW, LP_OLD, i, loss_reference.in_loss(MASK)[i])
        assert log_s.exp().item() == pytest.approx(right, **CLOSE)


def test_gates_and_slopes_of_sapo():
    for i, t in TOKENS:
        r = loss_reference.ratio(LP_NEW, LP_OLD, i, t).requires_grad_()
        gate = loss_reference.sapo_gate(r, ADVANTAGES[i])
        gate.backward()
        assert gate.item() == pytest.approx(SAPO_GATES[i][t], **CLOSE)
        assert r.grad.item() == pytest.approx(SAPO_SLOPES[i][t], **CLOSE)


@pytest.mark.parametrize(("name", "w_right", "phi_right"), VESPO_KERNELS)
def test_kernel_of_vespo(name, w_right, phi_right):
    (example,) = [example for example in EXAMPLES if example.name == name]
    log_probs = (LP_NEW, LOG_PROBS[example.denominator], LP_ROLL)
    batch = loss_reference.Batch(*log_probs, ADVANTAGES, MASK, weights_of(example))
    w = [loss_reference.vespo_w(batch, i) for i in range(2)]
    assert [value.item() for value in w] == pytest.approx(w_right, **CLOSE)
    phi = [loss_reference.vespo_phi(w[i], ADVANTAGES[i]).item() for i in range(2)]
    assert phi == pytest.approx(phi_right, **CLOSE)


@pytest.mark.parametrize(("denominator", "right"), M2PO_KEPT)
def test_tokens_that_m2po_keeps(denominator, right):
    assert loss_reference.m2po_kept(LP_NEW, LOG_PROBS[denominator], MASK, 0.04) == right


def test_second_moments_of_m2po():
    for i, t in TOKENS:
        moment = loss_reference.log_ratio(LP_NEW, LP_OLD, i, t) ** 2
        assert moment.item() == pytest.approx(M2_OLD[i][t], **CLOSE)


def test_m2po_keeps_the_single_smallest_where_all_exceed():
    assert loss_reference.m2po_kept([[1.0, -2.0]], [[0.0, 0.0]], [[1, 1]]) == [{0}]


@pytest.mark.parametrize(("convention", "right"), [("around_one", (0.8, 1.3)), ("cap", (0.0, 0.3))])
def test_conventions_for_the_bounds_of_cispo(convention, right):
    assert loss_reference.cispo_bounds(convention, 0.2, 0.3) == pytest.approx(right)


def test_truncated_weights():
    found = correction_reference.truncated_token(LP_OLD, LP_ROLL, MASK)
    for i, t in TOKENS:
        assert found[i][t] == pytest.approx(TIS_WEIGHTS[i][t], **CLOSE)


def test_sequence_products():
    found = correction_reference.truncated_sequence(LP_OLD, LP_ROLL, MASK, cap=100.0)
    assert [found[0][0], found[1][1]] == pytest.approx(SEQUENCE_PRODUCTS, **CLOSE)


def test_a_wider_band_of_icepop_drops_nothing():
    dropped = correction_reference.icepop(LP_OLD, LP_ROLL, MASK, alpha=0.5, beta=5.0)
    assert correction_reference.masked_share(dropped, MASK) == 0.0


def test_clip_fractions():
    found = correction_reference.clip_fractions(
        LP_NEW, LP_OLD, ADVANTAGES, MASK, eps_low=0.2, eps_high=0.3
    )
    assert found == pytest.approx(CLIP_FRACTIONS)


# mean 1e-6, std 1e-6: 1e-6 / (1e-6 + 1e-6)
SMALL_STD = ([2e-6, 0.0], {"ddof": 0}, [0.5, -0.5])


@pytest.mark.parametrize(("rewards", "settings", "right"), [*ADVANTAGE_EXAMPLES, SMALL_STD])
def test_group_relative_advantages(rewards, settings, right):
    found = correction_reference.group_relative(rewards, **settings)
    assert found == pytest.approx(right, **CLOSE)


def test_leave_one_out_is_the_centred_reward_scaled():
    # 4 / 3 * [0.75, -0.25, -0.25, -0.25]
    found = correction_reference.leave_one_out([1.0, 0.0, 0.0, 0.0])
    assert found == pytest.approx([1.0] + [-1.0 / 3.0] * 3)


@pytest.mark.parametrize(("length", "right"), [*OVERLONG_EXAMPLES, (20481, -1.0)])
def test_overlong_penalty(length, right):
    assert correction_reference.overlong_penalty(length, max_length=20480, cache=4096) == right


@pytest.mark.parametrize("estimator", sorted(KL_EXAMPLES))
def test_kl_estimators(estimator):
    for i, t in TOKENS:
        found = correction_reference.kl(LP_NEW[i][t], LP_OLD[i][t], estimator).item()
        assert found == pytest.approx(KL_EXAMPLES[estimator][i][t], **CLOSE)


@pytest.mark.parametrize("estimator", sorted(KL_EXPECTED))
def test_expectation_of_the_kl_estimators(estimator):
    found = 0.0
    for p, q in zip(KL_P, KL_Q, strict=True):
        found += p * correction_reference.kl(math.log(p), math.log(q), estimator).item()
    assert found == pytest.approx(KL_EXPECTED[estimator], **CLOSE)


@pytest.mark.parametrize(("logits", "right"), ENTROPY_EXAMPLES)
def test_entropy(logits, right):
    assert correction_reference.entropy(logits) == pytest.approx(right, **CLOSE)


def test_every_fault_case_has_its_id():
    assert all(case.id == name for name, case in FAULT_CASES.items())
