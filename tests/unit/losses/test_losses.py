"""Token losses: worked examples, an independent transcription, ratio 1, masks, extreme ratios."""

import math
from dataclasses import replace

import pytest
import torch
from unit.losses import correction_reference, loss_reference
from unit.losses.loss_examples import (
    ADVANTAGES,
    EXAMPLES,
    FAULT_CASES,
    GSPO_RATIOS,
    LOG_PROBS,
    LP_NEW,
    LP_OLD,
    LP_ROLL,
    M2_OLD,
    M2PO_KEPT,
    MASK,
    RATIOS,
    SAPO_GATES,
    SAPO_SLOPES,
    VESPO_KERNELS,
)
from unit.losses.loss_rows import (
    SETTING_OF,
    correct,
    flat,
    loss_inputs,
    random_rows,
    run,
    token_loss,
)

from rollverify.config.losses import LOSSES
from rollverify.losses.inputs import policy_log_ratio
from rollverify.losses.weighted import second_moment_limit

CLOSE = {"abs": 1e-6, "rel": 0.0}
WIDE_CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def example_settings(example):
    """(loss, settings) in the product's words."""
    given = {SETTING_OF.get(name, name): value for name, value in example.settings.items()}
    if example.loss == "cispo":
        return "cispo", {"convention": "absolute", "clip_high": given["upper"]}
    if example.loss == "decoupled_ppo":
        cap = given.pop("upper")
        return "decoupled_ppo", given | {"weight_cap": math.inf if cap is None else cap}
    if example.loss == "bypass_policy_gradient":
        return "reinforce", {}
    return example.loss, given


def example_correction(example):
    if example.loss == "bypass_policy_gradient":
        return correct("truncated", LP_NEW, LP_ROLL, MASK, threshold=2.0)
    if example.correction is None:
        return None
    given = example.correction_settings
    if example.correction == "truncated_token":
        return correct("truncated", LP_OLD, LP_ROLL, MASK, threshold=given["cap"])
    if example.correction == "icepop":
        band = {"low": given["alpha"], "high": given["beta"]}
        return correct("icepop", LP_OLD, LP_ROLL, MASK, **band)
    low, high = given["bounds"]
    return correct("masked", LP_OLD, LP_ROLL, MASK, level="sequence", low=low, high=high)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: one.name)
def test_value_and_gradient_are_those_of_the_worked_example(example):
    name, settings = example_settings(example)
    rows = (LOG_PROBS[example.policy], LOG_PROBS[example.denominator], LP_ROLL, ADVANTAGES, MASK)
    loss, gradient = run(
        name,
        rows,
        aggregation=example.aggregation,
        constant=example.constant,
        correction=example_correction(example),
        **settings,
    )
    assert loss == pytest.approx(example.value, **CLOSE)
    assert gradient[5] == 0.0
    if example.gradient is not None:
        assert gradient.tolist() == pytest.approx(flat(example.gradient).tolist(), **CLOSE)


CASES = {
    "grpo": ("grpo", {"eps_low": 0.2, "eps_high": 0.3}, WIDE_CLIP),
    "dual_clip": ("grpo", {"dual_clip": 1.1}, {"dual_clip": 1.1}),
    "dr_grpo": ("dr_grpo", {"eps_low": 0.1, "eps_high": 0.2}, {"clip_low": 0.1, "clip_high": 0.2}),
    "gspo": ("gspo", {}, {}),
    "gspo_wide": ("gspo", {"eps_low": 0.2, "eps_high": 0.3}, WIDE_CLIP),
    "gspo_token": ("gspo_token", {"eps_low": 0.2, "eps_high": 0.3}, WIDE_CLIP),
    "sapo": ("sapo", {}, {}),
    "vespo": ("vespo", {}, {}),
    "cispo": ("cispo", {"lower": 0.8, "upper": 1.3}, WIDE_CLIP),
    "cispo_absolute": (
        "cispo",
        {"lower": 0.0, "upper": 1.3},
        {"clip_high": 1.3, "convention": "absolute"},
    ),
    "cispo_default": ("cispo", {}, {}),
    "decoupled_ppo": ("decoupled_ppo", {"upper": 1.2}, {"weight_cap": 1.2}),
    "decoupled_ppo_clamp": (
        "decoupled_ppo",
        {"upper": 1.2, "action": "clamp"},
        {"weight_cap": 1.2, "cap_action": "clamp"},
    ),
    "m2po": ("m2po", {"tau": 0.1}, {"threshold": 0.1}),
    "reinforce": ("reinforce", {}, {}),
}
"""Loss, the reference's settings, ours."""

MODES = ["token_mean", "sequence_mean", "constant_length"]


def test_every_loss_is_compared():
    assert {name for name, _, _ in CASES.values()} == set(LOSSES)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_are_those_of_the_transcription(case, mode, weighted):
    name, theirs, ours = CASES[case]
    for seed in range(8):
        rows = random_rows(seed)
        policy, denominator, behavior, advantages, mask = rows
        correction = correct("truncated", denominator, behavior, mask) if weighted else None
        loss, gradient = run(
            name, rows, aggregation=mode, constant=5, correction=correction, **ours
        )
        leaves = [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in policy]
        weights = correction_reference.truncated_token(denominator, behavior, mask)
        right = loss_reference.LOSSES[name](
            *(leaves, denominator, behavior, advantages, mask),
            weights=weights if weighted else None,
            aggregation=mode,
            constant=5.0,
            **theirs,
        )
        right.backward()
        assert loss == pytest.approx(right.item(), **CLOSE)
        zeros = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        assert gradient.tolist() == pytest.approx(torch.cat(zeros).tolist(), **CLOSE)


@pytest.mark.parametrize("name", LOSSES)
def test_at_ratio_one_the_gradient_is_the_plain_policy_gradient(name):
    rows = (LP_OLD, LP_OLD, LP_OLD, ADVANTAGES, MASK)
    _, gradient = run(name, rows, aggregation="token_mean")
    # -A / 5 tokens; the padded token exactly 0.
    assert gradient.tolist() == pytest.approx([-0.2, -0.2, -0.2, 0.2, 0.2, 0.0], abs=1e-8)
    assert gradient[5] == 0.0


@pytest.mark.parametrize("filler", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("name", LOSSES)
def test_ir03_masked_positions_touch_neither_loss_nor_gradient(name, filler):
    """IR03: whatever stands there, in any of the arrays."""
    case = FAULT_CASES["IR03"]
    policy = torch.tensor([*case.inputs["new"][:2], filler], dtype=torch.float64)
    policy.requires_grad_()
    padded = [[-1.0, -2.0, filler]]
    inputs = loss_inputs(policy, padded, padded, [1.0], [case.inputs["mask"]])
    advantages = inputs.advantages
    advantages[2] = filler
    losses, diagnostics = token_loss(name, inputs)
    losses.sum().backward()
    assert losses.isfinite().all() and losses[2] == 0.0
    assert policy.grad.tolist() == pytest.approx([-1.0, -1.0, 0.0], abs=1e-9)
    assert policy.grad[2] == case.right["padded_gradient"]
    assert all(values[2] == 0.0 for values in diagnostics.values())


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("difference", [100.0, -100.0])
@pytest.mark.parametrize("name", LOSSES)
def test_ir01_extreme_log_ratios_stay_finite(name, difference, advantage):
    """IR01, in float32, whose exponential overflows at 88.7."""
    policy = torch.tensor([difference - 200.0, -1.0], requires_grad=True)
    rows = ([[-200.0, -1.0]], [[-200.0, -1.0]], [advantage], [[1, 1]])
    losses, diagnostics = token_loss(name, loss_inputs(policy, *rows, dtype=torch.float32))
    losses.sum().backward()
    assert losses.isfinite().all() and policy.grad.isfinite().all()
    assert all(values.isfinite().all() for values in diagnostics.values())
    if advantage == 0.0:
        assert losses.tolist() == [0.0, 0.0] and policy.grad.tolist() == [0.0, 0.0]


def test_ir05_gspo_takes_the_mean_and_vespo_the_sum():
    """IR05: 1,000 tokens of 0.01 nats."""
    rows = ([[-0.99] * 1000], [[-1.0] * 1000], [[-1.0] * 1000], [-1.0], [[1] * 1000])
    losses, _ = token_loss("gspo", loss_inputs(*rows))
    assert losses[0].item() == pytest.approx(1.010050, abs=1e-6)  # A = -1: unclipped above
    _, diagnostics = token_loss("vespo", loss_inputs(*rows), negative_power=1.0, negative_decay=0.0)
    assert diagnostics["gate"][0].item() == pytest.approx(22026.47, abs=0.01)


def test_clipped_tokens_are_told_apart_by_side():
    # Ratios 1.127, 1.49, 0.95 with A = 1 and 0.67, 1.35 with A = -1, clipped at 0.8 and 1.3.
    _, flags = token_loss("grpo", loss_inputs(LP_NEW, LP_OLD, LP_ROLL, ADVANTAGES, MASK))
    assert flags["is_clipped_low"].tolist() == [0, 0, 0, 1, 0, 0]
    assert flags["is_clipped_high"].tolist() == [0, 1, 0, 0, 0, 0]
    _, dual = token_loss(
        "grpo", loss_inputs(LP_NEW, LP_OLD, LP_ROLL, ADVANTAGES, MASK), dual_clip=1.2
    )
    assert dual["is_clipped_high"].tolist() == [0, 1, 0, 0, 1, 0]


def test_dropped_tokens_are_flagged():
    inputs = loss_inputs(LP_NEW, LP_OLD, LP_ROLL, ADVANTAGES, MASK)
    # Squares 0.0144, 0.16, 0.0025, 0.16, 0.09; both 0.16 go.
    assert token_loss("m2po", inputs)[1]["is_masked"].tolist() == [0, 1, 0, 1, 0, 0]
    # denominator / behavior is 2.2 at the second token.
    masked = token_loss("decoupled_ppo", inputs, weight_cap=2.0)[1]["is_masked"]
    assert masked.tolist() == [0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("squares", "limit"),
    [
        ([0.0144, 0.16, 0.0025, 0.16, 0.09], 0.125),  # (0.09 + 0.16) / 2
        ([0.01, 0.02], math.inf),  # nothing to drop
        ([0.09, 1.0], 0.545),  # all exceed: the smallest stays, (0.09 + 1) / 2
        ([0.08, 0.0], 0.04),  # the mean 0.04 is not below 0.04
        ([0.5, 0.5], math.inf),  # equal values stay together
        ([], math.inf),
    ],
)
def test_the_limit_of_m2po_lies_between_kept_and_dropped(squares, limit):
    assert second_moment_limit(torch.tensor(squares, dtype=torch.float64), 0.04) == pytest.approx(
        limit
    )


def test_a_limit_of_the_whole_batch_replaces_that_of_the_row():
    inputs = loss_inputs(LP_NEW, LP_OLD, LP_ROLL, ADVANTAGES, MASK)
    _, flags = token_loss("m2po", replace(inputs, limit=0.01))
    assert flags["is_masked"].tolist() == [1, 1, 0, 1, 1, 0]


WORKED = (ADVANTAGES, MASK)


@pytest.mark.parametrize(("numerator", "denominator", "right"), RATIOS)
def test_ratios_and_second_moments_are_the_worked_ones(numerator, denominator, right):
    rows = (LOG_PROBS[numerator], LOG_PROBS[denominator], LP_ROLL)
    log_ratio = policy_log_ratio(loss_inputs(*rows, *WORKED))
    assert log_ratio.exp().tolist()[:5] == pytest.approx(flat(right).tolist(), **CLOSE)
    if (numerator, denominator) == ("new", "old"):
        assert log_ratio.square().tolist()[:5] == pytest.approx(flat(M2_OLD).tolist(), **CLOSE)


def test_ir01_ratios_are_clamped():
    case = FAULT_CASES["IR01"]
    row = ([case.inputs["log_ratios"]], [[0.0, 0.0]], [[0.0, 0.0]], [1.0], [[1, 1]])
    ratios = policy_log_ratio(loss_inputs(*row)).exp()
    assert ratios.tolist() == pytest.approx(case.right["ratios"], rel=1e-3)


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_the_ratios_of_gspo_are_the_worked_ones(name):
    inputs = loss_inputs(LP_NEW, LP_OLD, LP_ROLL, *WORKED)
    losses, _ = token_loss(name, inputs, clip_low=1.0, clip_high=9.0)
    ratios = [GSPO_RATIOS[0]] * 3 + [GSPO_RATIOS[1]] * 2
    assert (-losses / inputs.advantages).tolist()[:5] == pytest.approx(ratios, **CLOSE)


def test_gates_and_slopes_of_sapo_are_the_worked_ones():
    """The loss is -f(r) A, the diagnostics hold f'(r)."""
    inputs = loss_inputs(LP_NEW, LP_OLD, LP_ROLL, *WORKED)
    losses, diagnostics = token_loss("sapo", inputs)
    gates = (-losses / inputs.advantages).tolist()[:5]
    assert gates == pytest.approx(flat(SAPO_GATES).tolist(), **CLOSE)
    slopes = diagnostics["gate"].tolist()
    assert slopes == pytest.approx([*flat(SAPO_SLOPES).tolist(), 0.0], **CLOSE)


@pytest.mark.parametrize(("name", "products", "kernels"), VESPO_KERNELS)
def test_products_and_kernels_of_vespo_are_the_worked_ones(name, products, kernels):
    (example,) = [example for example in EXAMPLES if example.name == name]
    inputs = loss_inputs(LP_NEW, LOG_PROBS[example.denominator], LP_ROLL, *WORKED)
    correction = example_correction(example)
    if correction is not None:
        inputs = replace(inputs, correction_weights=correction.weights)
    # W^1 exp(0) is the product itself.
    words = ("positive_power", "negative_power", "positive_decay", "negative_decay")
    bare = dict(zip(words, (1.0, 1.0, 0.0, 0.0), strict=True))
    for settings, (first, second) in ((bare, products), ({}, kernels)):
        gate = token_loss("vespo", inputs, **settings)[1]["gate"].tolist()
        assert gate == pytest.approx([first] * 3 + [second] * 2 + [0.0], **CLOSE)


def test_the_product_of_vespo_is_bounded():
    """Tokens clamped to 20 nats each, their sum of 40 to 20 again."""
    rows = ([[100.0, 100.0]], [[0.0, 0.0]], [[0.0, 0.0]], [1.0], [[1, 1]])
    _, found = token_loss("vespo", loss_inputs(*rows), positive_power=1.0, positive_decay=0.0)
    assert found["gate"].tolist() == pytest.approx([math.exp(20.0)] * 2)


def test_m2po_keeps_the_smaller_of_two_neighbours():
    """Both squares are above the threshold, one float32 step apart; the smallest always stays."""
    ratios = torch.tensor([1.5130938291549683, 1.5130939483642578])
    inputs = loss_inputs(ratios, [[0.0, 0.0]], [[0.0, 0.0]], [1.0], [[1, 1]], torch.float32)
    _, flags = token_loss("m2po", inputs)
    assert flags["is_masked"].tolist() == [0, 1]


@pytest.mark.parametrize(("denominator", "kept"), M2PO_KEPT)
def test_m2po_keeps_the_worked_tokens(denominator, kept):
    inputs = loss_inputs(LP_NEW, LOG_PROBS[denominator], LP_ROLL, *WORKED)
    is_masked = token_loss("m2po", inputs)[1]["is_masked"].view(2, 3)
    for row, (places, mask) in enumerate(zip(kept, MASK, strict=True)):
        assert {t for t in range(3) if mask[t] and not is_masked[row, t]} == places


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_the_ratio_of_gspo_is_bounded(name):
    # A = -1 is not clipped above: exp(10), where exp(100) would be inf in float32.
    rows = ([[100.0]], [[0.0]], [[0.0]], [-1.0], [[1]])
    losses, _ = token_loss(name, loss_inputs(*rows, dtype=torch.float32))
    assert losses.item() == pytest.approx(math.exp(10.0), rel=1e-5)
