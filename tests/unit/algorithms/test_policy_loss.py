"""Token losses: worked values and gradients, extreme ratios, masks, finite differences.

The worked example is one packed row of two trajectories, 3 and 2 tokens, and a padding token;
advantages +1 and -1. Ratios:
    policy / anchor    1.127497  1.491825  0.951229 | 0.670320  1.349859
    anchor / behavior  0.980199  2.225541  0.951229 | 1.105171  0.860708
    policy / behavior  1.105171  3.320117  0.904837 | 0.740818  1.161834
"""

import math

import pytest
import torch

from rollverify.algorithms.policy_loss import (
    clipped_surrogate,
    grpo_token_loss,
    truncated_importance_weights,
)

BEHAVIOR = torch.tensor([-0.50, -2.00, -1.20, -0.80, -1.45, 0.0], dtype=torch.float64)
ANCHOR = torch.tensor([-0.52, -1.20, -1.25, -0.70, -1.60, 0.0], dtype=torch.float64)
POLICY = torch.tensor([-0.40, -0.80, -1.30, -1.10, -1.30, 0.0], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, 0.0], dtype=torch.float64)
MASK = torch.tensor([True, True, True, True, True, False])

TOKEN_MEAN = torch.full((6,), 1 / 5, dtype=torch.float64)
# Mean over 2 sequences of the mean over 3 and 2 tokens.
SEQUENCE_MEAN = torch.tensor([1 / 6, 1 / 6, 1 / 6, 1 / 4, 1 / 4, 0.0], dtype=torch.float64)
# Mean over 2 sequences of the sum over tokens divided by 3.
CONSTANT_LENGTH = torch.full((6,), 1 / 6, dtype=torch.float64)


def value_and_gradient(token_loss_of, weights, policy=POLICY):
    policy = policy.clone().requires_grad_()
    loss = (token_loss_of(policy) * weights).sum()
    loss.backward()
    return loss.item(), policy.grad.tolist()


def surrogate(clip_low, clip_high, denominator=ANCHOR):
    return lambda policy: clipped_surrogate(
        policy, denominator, ADVANTAGES, MASK, clip_low=clip_low, clip_high=clip_high
    )[0]


def call_with(**changes):
    arguments = {
        "policy_logprobs": POLICY,
        "anchor_logprobs": ANCHOR,
        "behavior_logprobs": BEHAVIOR,
        "advantages": ADVANTAGES,
        "loss_mask": MASK,
        "clip_low": 0.2,
        "clip_high": 0.3,
        "truncation_threshold": 2.0,
    }
    return grpo_token_loss(**{**arguments, **changes})


def grpo(threshold, anchor=ANCHOR):
    return lambda policy: call_with(
        policy_logprobs=policy, anchor_logprobs=anchor, truncation_threshold=threshold
    )[0]


@pytest.mark.parametrize(
    ("token_loss", "weights", "loss", "gradient"),
    [
        # Losses per token: -1.127497, -1.2, -0.951229, 0.8, 1.349859.
        (surrogate(0.2, 0.2), SEQUENCE_MEAN, -0.008990, [-0.187916, 0, -0.158538, 0, 0.337465]),
        (surrogate(0.2, 0.2), CONSTANT_LENGTH, -0.188145, [-0.187916, 0, -0.158538, 0, 0.224976]),
        # With 0.3 above, the second is -1.3; with 0.28, -1.28.
        (surrogate(0.2, 0.3), TOKEN_MEAN, -0.245773, [-0.225499, 0, -0.190246, 0, 0.269972]),
        (surrogate(0.2, 0.28), TOKEN_MEAN, -0.241773, [-0.225499, 0, -0.190246, 0, 0.269972]),
    ],
    ids=["grpo", "dr_grpo", "dapo_0.3", "dapo_0.28"],
)
def test_clipped_surrogate_has_the_worked_value_and_gradient(token_loss, weights, loss, gradient):
    value, computed_gradient = value_and_gradient(token_loss, weights)
    assert value == pytest.approx(loss, abs=1e-6)
    assert computed_gradient == pytest.approx([*gradient, 0.0], abs=1e-6)


@pytest.mark.parametrize(
    ("token_loss", "loss"),
    [
        # Weights 0.980199, 2 (from 2.225541), 0.951229, 1.105171, 0.860708 on the losses above.
        (grpo(2.0), -0.512807),
        # Uncapped: only the clipped second token changes, so the gradient does not.
        (grpo(math.inf), -0.571448),
        # Two policies: the ratio is taken to the behavior policy directly, without a weight.
        (surrogate(0.2, 0.3, denominator=BEHAVIOR), -0.269635),
    ],
    ids=["truncated", "uncapped", "bypass"],
)
def test_corrected_loss_has_the_worked_value_and_gradient(token_loss, loss):
    value, gradient = value_and_gradient(token_loss, TOKEN_MEAN)
    assert value == pytest.approx(loss, abs=1e-6)
    expected = [-0.221034, 0, -0.180967, 0, 0.232367, 0]
    assert gradient == pytest.approx(expected, abs=1e-6)


def test_single_step_is_corrected_by_the_weight_alone():
    # policy = anchor: ratio 1, loss -w A; weights 0.980199, 2, 0.951229, 1.105171, 0.860708:
    # (-0.980199 - 2 - 0.951229 + 1.105171 + 0.860708) / 5 = -0.393110.
    value, gradient = value_and_gradient(grpo(2.0), TOKEN_MEAN, policy=ANCHOR)
    assert value == pytest.approx(-0.393110, abs=1e-6)
    expected = [-0.19604, -0.4, -0.190246, 0.221034, 0.172142, 0]
    assert gradient == pytest.approx(expected, abs=1e-6)


def test_weights_of_the_policy_itself_give_the_plain_policy_gradient():
    # loss = -min(policy / behavior, 2) A log(policy), weights 1.105171, 2, 0.904837, ...
    def token_loss(policy):
        weight = truncated_importance_weights(policy, BEHAVIOR, MASK, 2.0)
        return -weight * ADVANTAGES * policy

    value, gradient = value_and_gradient(token_loss, TOKEN_MEAN)
    assert value == pytest.approx(0.178614, abs=1e-6)
    expected = [-0.221034, -0.4, -0.180967, 0.148164, 0.232367, 0]
    assert gradient == pytest.approx(expected, abs=1e-6)


def test_no_correction_leaves_the_clipped_surrogate():
    assert grpo(None)(POLICY).tolist() == surrogate(0.2, 0.3)(POLICY).tolist()


def test_clipped_tokens_are_told_apart_by_side():
    # Token 1: A > 0, ratio 1.49 > 1.3. Token 3: A < 0, ratio 0.67 < 0.8.
    # Token 4 has ratio 1.35 > 1.3 but A < 0: raising it is what the clip must not stop.
    _, low, high = clipped_surrogate(POLICY, ANCHOR, ADVANTAGES, MASK, clip_low=0.2, clip_high=0.3)
    assert low.tolist() == [False, False, False, True, False, False]
    assert high.tolist() == [False, True, False, False, False, False]


def test_gradient_agrees_with_finite_differences():
    # float64, step 1e-6: the central difference is good to about 1e-9 here.
    generator = torch.Generator().manual_seed(11)
    policy = -2 * torch.rand(6, generator=generator, dtype=torch.float64)
    _, gradient = value_and_gradient(grpo(2.0), SEQUENCE_MEAN, policy=policy)
    for token in range(6):
        step = torch.zeros(6, dtype=torch.float64)
        step[token] = 1e-6
        above = (grpo(2.0)(policy + step) * SEQUENCE_MEAN).sum()
        below = (grpo(2.0)(policy - step) * SEQUENCE_MEAN).sum()
        assert gradient[token] == pytest.approx((above - below).item() / 2e-6, abs=1e-7)


@pytest.mark.parametrize("difference", [100.0, -100.0])
def test_ir01_an_extreme_ratio_times_zero_advantage_is_zero(difference):
    policy = torch.tensor([difference - 200.0], requires_grad=True)
    token_loss, _ = grpo_token_loss(
        policy,
        torch.tensor([-200.0]),
        torch.tensor([-200.0]),
        torch.zeros(1),
        torch.tensor([True]),
        clip_low=0.2,
        clip_high=0.3,
        truncation_threshold=2.0,
    )
    token_loss.sum().backward()
    assert token_loss.tolist() == [0.0]
    assert policy.grad.isfinite().all()


@pytest.mark.parametrize(("difference", "ratio"), [(100.0, 4.8516520e8), (-100.0, 2.0611536e-9)])
def test_ir01_ratios_are_clamped_at_20_nats(difference, ratio):
    # exp(20) = 4.8517e8 and exp(-20) = 2.06e-9; float32 carries about 7 digits.
    anchor, behavior = torch.tensor([difference - 150.0]), torch.tensor([-150.0])
    weight = truncated_importance_weights(anchor, behavior, torch.tensor([True]), math.inf)
    assert weight.item() == pytest.approx(ratio, rel=1e-5)
    # With A = -1 (unclipped above, so that the ratio itself is the loss) and A = +1 (below).
    advantage = torch.tensor([-1.0 if difference > 0 else 1.0])
    loss, _, _ = clipped_surrogate(
        anchor, behavior, advantage, torch.tensor([True]), clip_low=0.2, clip_high=0.3
    )
    assert loss.abs().item() == pytest.approx(ratio, rel=1e-5)


@pytest.mark.parametrize("filler", [-math.inf, math.inf, math.nan])
def test_ir03_masked_positions_touch_neither_loss_nor_gradient(filler):
    policy = torch.tensor([-1.0, -2.0, 0.0], requires_grad=True)
    padded = torch.tensor([-1.0, -2.0, filler])
    token_loss, diagnostics = grpo_token_loss(
        policy,
        padded,
        padded,
        torch.tensor([1.0, 1.0, filler]),
        torch.tensor([True, True, False]),
        clip_low=0.2,
        clip_high=0.3,
        truncation_threshold=2.0,
    )
    token_loss.sum().backward()
    assert token_loss.tolist() == [-1.0, -1.0, 0.0]
    assert policy.grad.tolist() == [-1.0, -1.0, 0.0]
    # Ratios used [1, 1], mean 1.
    assert diagnostics["ratio"].tolist() == [1.0, 1.0, 0.0]
    assert diagnostics["correction_weight"].tolist() == [1.0, 1.0, 0.0]


def test_ir03_a_masked_policy_logprob_of_minus_infinity_gets_no_gradient():
    policy = torch.tensor([-1.0, -math.inf], requires_grad=True)
    loss, _, _ = clipped_surrogate(
        policy,
        torch.tensor([-1.0, -1.0]),
        torch.ones(2),
        torch.tensor([True, False]),
        clip_low=0.2,
        clip_high=0.3,
    )
    loss.sum().backward()
    assert policy.grad.tolist() == [-1.0, 0.0]


def test_ir07_large_weights_are_truncated_not_dropped():
    # exp(0.7) = 2.013753 is cut to 2; exp(-1.5) = 0.223130 stays.
    anchor = torch.tensor([-0.3, -2.5], requires_grad=True)
    weight = truncated_importance_weights(
        anchor, torch.tensor([-1.0, -1.0]), torch.tensor([True, True]), 2.0
    )
    assert weight.tolist() == pytest.approx([2.0, 0.223130], abs=1e-6)
    assert not weight.requires_grad


def test_diagnostics_have_the_worked_values():
    _, diagnostics = call_with()
    expected = {
        "ratio": [1.127497, 1.491825, 0.951229, 0.670320, 1.349859],
        # exp(d) - 1 - d with d = 0.12, 0.4, -0.05, -0.4, 0.3.
        "kl": [0.007497, 0.091825, 0.001229, 0.070320, 0.049859],
        "is_clipped_low": [0, 0, 0, 1, 0],
        "is_clipped_high": [0, 1, 0, 0, 0],
        "correction_weight": [0.980199, 2.0, 0.951229, 1.105171, 0.860708],
        "is_truncated": [0, 1, 0, 0, 0],
        "mismatch_abs": [0.02, 0.8, 0.05, 0.1, 0.15],
        # exp(d) - 1 - d with d = -0.02, 0.8, -0.05, 0.1, -0.15.
        "mismatch_k3": [0.000199, 0.425541, 0.001229, 0.005171, 0.010708],
    }
    assert diagnostics.keys() == expected.keys()
    for name, values in expected.items():
        assert diagnostics[name].tolist() == pytest.approx([*values, 0.0], abs=1e-6), name
        assert not diagnostics[name].requires_grad


def test_float32_agrees_with_float64():
    single = call_with(
        policy_logprobs=POLICY.float(),
        anchor_logprobs=ANCHOR.float(),
        behavior_logprobs=BEHAVIOR.float(),
        advantages=ADVANTAGES.float(),
    )[0]
    assert single.dtype == torch.float32
    # A few units of float32's last place at values near 2.
    torch.testing.assert_close(single.double(), grpo(2.0)(POLICY), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"anchor_logprobs": ANCHOR[:5]}, "anchor_logprobs has shape"),
        ({"policy_logprobs": POLICY.bfloat16()}, "policy_logprobs must be float32"),
        ({"loss_mask": MASK.float()}, "loss_mask"),
        ({"clip_low": 1.0}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"truncation_threshold": 0.0}, "threshold"),
        (
            {"behavior_logprobs": BEHAVIOR.clone().fill_(-math.inf)},
            r"behavior_logprobs\[0\] is -inf",
        ),
        ({"policy_logprobs": POLICY * math.nan}, r"policy_logprobs\[0\] is nan"),
    ],
)
def test_bad_input_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        call_with(**changes)
