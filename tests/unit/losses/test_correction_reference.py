"""The reference corrections and estimators on the fault cases and on numbers worked out by hand.

Whether the product agrees with the reference is not decided here.
"""

import math

import pytest
import torch
from unit.losses import correction_reference as correction
from unit.losses import loss_reference as reference
from unit.losses.loss_examples import ADVANTAGES, FAULT_CASES, LP_NEW, LP_OLD, LP_ROLL, MASK

CLOSE = {"abs": 1e-6, "rel": 0.0}
ZEROS = [[0.0, 0.0]]


def test_no_nan_where_the_advantage_is_zero():
    """IR01."""
    case = FAULT_CASES["IR01"]
    new = torch.tensor([case.inputs["log_ratios"]], dtype=torch.float64, requires_grad=True)
    loss = reference.grpo(new, ZEROS, ZEROS, [case.inputs["advantage"]], [[1, 1]])
    loss.backward()
    assert loss.item() == case.right["loss"] and torch.isfinite(new.grad).all()
    # exp(20) and exp(-20)
    ratios = [reference.ratio(new, ZEROS, 0, t).item() for t in range(2)]
    assert ratios == pytest.approx(case.right["ratios"], rel=1e-3)


@pytest.mark.parametrize("name", sorted(reference.LOSSES))
def test_what_stands_under_the_mask_is_never_read(name):
    """IR03."""
    case = FAULT_CASES["IR03"]
    new = torch.tensor([case.inputs["new"]], dtype=torch.float64, requires_grad=True)
    old, mask = [case.inputs["old"]], [case.inputs["mask"]]
    loss = reference.LOSSES[name](new, old, old, [1.0], mask, aggregation="token_mean")
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(new.grad).all()
    assert new.grad[0, 2] == case.right["padded_gradient"]
    weights = correction.truncated_token(new, old, mask)
    assert weights[0][:2] == case.right["ratios"]


@pytest.mark.parametrize("form", ["geometric", "product"])
def test_mean_and_sum_forms_of_a_sequence_weight(form):
    """IR05."""
    case = FAULT_CASES["IR05"]
    count = case.inputs["tokens"]
    new, old, mask = [[case.inputs["log_ratio"]] * count], [[0.0] * count], [[1] * count]
    found = correction.sequence_rho(new, old, mask, 0, form)
    assert found == pytest.approx(case.right[form], rel=1e-6)


def test_truncation_is_not_masking():
    """IR07."""
    case = FAULT_CASES["IR07"]
    old = torch.tensor([case.inputs["log_ratios"]], dtype=torch.float64, requires_grad=True)
    weights = correction.truncated_token(old, ZEROS, [[1, 1]], cap=case.inputs["cap"])
    assert weights[0] == pytest.approx(case.right["weights"], **CLOSE)
    reference.reinforce([[-1.0, -1.0]], ZEROS, ZEROS, [1.0], [[1, 1]], weights=weights)
    assert old.grad is None


def test_token_mean_over_micro_batches_is_that_of_the_batch():
    """AG01."""
    case = FAULT_CASES["AG01"]
    batch = [row for micro_batch in case.inputs["micro_batches"] for row in micro_batch]
    mask = [[1] * len(row) for row in batch]
    assert reference.aggregate(batch, mask, "token_mean") == case.right["token_mean"]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_aggregations_differ_in_what_is_averaged(aggregation):
    """AG03."""
    case = FAULT_CASES["AG03"]
    losses = case.inputs["token_losses"]
    mask = [[1] * len(row) for row in losses]
    assert reference.aggregate(losses, mask, aggregation) == case.right[aggregation]


def test_a_fully_masked_sequence_leaves_the_denominator():
    # (1 + 3) / 2 of one sequence; (1 + 3) / 1 sequence / 8
    losses, mask = [[1.0, 3.0], [9.0, 9.0]], [[1, 1], [0, 0]]
    assert reference.aggregate(losses, mask, "sequence_mean") == 2.0
    assert reference.aggregate(losses, mask, "constant_length", 8.0) == 0.5


def test_groups_of_equal_rewards_have_no_advantage():
    """AD01."""
    case = FAULT_CASES["AD01"]
    groups = case.inputs["groups"]
    assert [correction.group_relative(group) for group in groups] == case.right["advantages"]
    silent = [group for group in groups if not correction.has_signal(sum(group), 4)]
    assert len(silent) == case.right["no_signal"]


def test_a_group_of_one_has_no_advantage():
    """AD03."""
    case = FAULT_CASES["AD03"]
    for advantages in (correction.group_relative, correction.leave_one_out):
        assert [advantages(group) for group in case.inputs["groups"]] == case.right["advantages"]


def test_two_definitions_of_the_standard_deviation():
    """AD05."""
    case = FAULT_CASES["AD05"]
    (group,) = case.inputs["groups"]
    for name, ddof in (("population", 0), ("unbiased", 1)):
        found = correction.group_relative(group, ddof=ddof, eps=case.inputs["eps"])
        assert found == pytest.approx(case.right[name][0], **CLOSE)
    assert correction.mean_centred(group) == case.right["centred"][0]


def test_log_probs_at_the_temperature_of_sampling():
    """LP01."""
    case = FAULT_CASES["LP01"]
    logits, temperature = case.inputs["logits"], case.inputs["temperature"]
    for token in (0, 1):
        found = correction.log_prob(logits, token, temperature)
        assert found == pytest.approx(case.right["at_temperature"][token], **CLOSE)
        raw = correction.log_prob(logits, token)
        assert raw == pytest.approx(case.right["raw"][token], **CLOSE)


def test_log_probs_renormalised_over_the_kept_tokens():
    """LP03."""
    case = FAULT_CASES["LP03"]
    token, logits = case.inputs["token"], [math.log(p) for p in case.inputs["p"]]
    # top-p 0.8 keeps tokens 0 and 1
    engine, full = correction.log_prob(logits[:2], token), correction.log_prob(logits, token)
    assert engine == pytest.approx(case.right["engine"], **CLOSE)
    assert full == pytest.approx(case.right["full"], **CLOSE)
    assert math.exp(full - engine) == pytest.approx(case.right["ratio_of_the_fault"], **CLOSE)


def test_log_probs_of_rounded_logits():
    """LP11."""
    case = FAULT_CASES["LP11"]
    logits, token = case.inputs["logits"], case.inputs["token"]
    rounded = torch.tensor(logits, dtype=torch.bfloat16).tolist()
    assert correction.log_prob(logits, token) == pytest.approx(case.right["float32"], **CLOSE)
    found = correction.log_prob(rounded, token)
    assert found == pytest.approx(case.right["from_bfloat16_logits"], **CLOSE)


@pytest.mark.parametrize(
    ("name", "settings", "right"),
    [
        # products 2.075081 and 0.951229; geometric means exp(0.73 / 3) and exp(-0.05 / 2)
        ("truncated_sequence", {}, [[2.0] * 3, [0.951229] * 2]),
        ("truncated_sequence", {"form": "geometric"}, [[1.275494] * 3, [0.975310] * 2]),
        ("masked_token", {"bounds": 2.0}, [[0.980199, 0.0, 0.951229], [1.105171, 0.860708]]),
        ("masked_token", {"bounds": (0.9, 3.0)}, [[0.980199, 2.225541, 0.951229], [1.105171, 0.0]]),
        # 1 / 1.15 = 0.869565
        ("masked_token", {"bounds": 1.15}, [[0.980199, 0.0, 0.951229], [1.105171, 0.0]]),
        ("masked_sequence", {"bounds": 2.0}, [[0.0] * 3, [0.951229] * 2]),
        ("masked_sequence", {"bounds": 2.0, "form": "geometric"}, [[1.275494] * 3, [0.97531] * 2]),
        ("geometric_mask", {}, [[0.0] * 3, [0.0] * 2]),
        ("geometric_mask", {"bounds": (0.97, 1.01)}, [[0.0] * 3, [1.0] * 2]),
        ("veto", {}, [[1.0] * 3, [1.0] * 2]),
        ("veto", {"threshold": 0.9}, [[1.0] * 3, [0.0] * 2]),
    ],
)
def test_weights_of_the_common_example(name, settings, right):
    found = correction.CORRECTIONS[name](LP_OLD, LP_ROLL, MASK, **settings)
    assert found[0] == pytest.approx(right[0], **CLOSE)
    assert found[1] == pytest.approx([*right[1], 0.0], **CLOSE)


def test_old_tokens_are_masked():
    found = correction.mask_old_tokens([[1, 2, 3], [3, 3, 0]], MASK, current_version=3, max_age=1)
    assert found == [[0.0, 1.0, 1.0], [1.0, 1.0, 0.0]]


@pytest.mark.parametrize(("delta", "right"), [(1e-4, 0.0), (0.06, 1.0)])
def test_off_policy_sequences_of_negative_advantage_are_dropped(delta, right):
    # sequence 2: mean of (-0.70 + 1.10, -1.60 + 1.30) = 0.05; sequence 1 has a positive advantage
    found = correction.off_policy_sequence_mask(LP_NEW, LP_OLD, ADVANTAGES, MASK, delta=delta)
    assert found == [[1.0] * 3, [right, right, 0.0]]


def test_off_policy_sequences_of_positive_advantage_stay():
    found = correction.off_policy_sequence_mask(LP_NEW, LP_OLD, [1.0, 1.0], MASK)
    assert found == [[1.0] * 3, [1.0, 1.0, 0.0]]


def test_sequence_weights_stay_finite():
    # a sum of 100 * 50, clamped to 20: exp(20) = 485165195.4
    found = correction.sequence_rho([[50.0] * 100], [[0.0] * 100], [[1] * 100], 0, "product")
    assert found == pytest.approx(485165195.4, rel=1e-9)


@pytest.mark.parametrize(("action", "right"), [("mask", [0.0, 0.97531]), ("clamp", [1.1, 0.97531])])
def test_decoupled_weights_of_whole_sequences(action, right):
    # geometric means 1.275494 and 0.975310 against an upper bound of 1.1
    settings = {"level": "sequence", "upper": 1.1, "action": action}
    found = reference.decoupled_ppo(LP_NEW, LP_OLD, LP_ROLL, ADVANTAGES, MASK, **settings).item()
    # row sums of max(-A r, -A clip(r, 0.8, 1.2)): -1.127497 - 1.2 - 0.951229 and 0.8 + 1.349859
    assert found == pytest.approx((-3.278726 * right[0] + 2.149859 * right[1]) / 5, **CLOSE)


def test_normalised_weights_have_mean_one():
    # 5.897307 / 5 = 1.179461
    weights = correction.truncated_token(LP_OLD, LP_ROLL, MASK)
    found = correction.normalized(weights, MASK)
    assert found[0][1] == pytest.approx(2.0 / 1.179461, **CLOSE)
    assert sum(sum(row) for row in found) == pytest.approx(5.0)


def test_diagnostics_of_weights():
    # (1 + 3 + 0)^2 / (3 * (1 + 9)) = 16 / 30
    weights, mask = [[1.0, 3.0, 0.0, 0.0]], [[1, 1, 1, 0]]
    assert correction.effective_sample_size(weights, mask) == pytest.approx(16.0 / 30.0)
    assert correction.masked_share(weights, mask) == pytest.approx(1.0 / 3.0)


def test_drift_between_engine_and_trainer():
    # rho - log rho - 1 for log rho = -0.02, 0.8, -0.05, 0.1, -0.15
    right = (0.000199 + 0.425541 + 0.001229 + 0.005171 + 0.010708) / 5
    assert correction.drift_kl(LP_OLD, LP_ROLL, MASK) == pytest.approx(right, **CLOSE)
