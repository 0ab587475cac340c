"""Runs the product's losses on nested lists, as the reference takes them: [B][T] with a mask.

The batch becomes one packed row, its padding left in as positions outside the mask.
"""

import random
from dataclasses import replace

import torch

from rollverify.config.function import load_function
from rollverify.config.losses import CORRECTIONS, LOSSES
from rollverify.losses.aggregation import Normalizer, count_batch
from rollverify.losses.corrections import CORRECTION_FUNCTIONS
from rollverify.losses.inputs import LossInputs, log_difference

SETTING_OF = {
    "eps_low": "clip_low",
    "eps_high": "clip_high",
    "tau_pos": "tau_positive",
    "tau_neg": "tau_negative",
    "tau": "threshold",
    "dual_clip": "dual_clip",
}
"""The product's name of a setting by the reference's, where one stands for one."""


def flat(rows, dtype=torch.float64):
    return torch.tensor([value for row in rows for value in row], dtype=dtype)


def sequence_ids(rows):
    return torch.tensor([i for i, row in enumerate(rows) for _ in row])


def advantages_of(values, mask):
    return flat([[value] * len(row) for value, row in zip(values, mask, strict=True)])


def loss_inputs(policy, denominator, behavior, advantages, mask, dtype=torch.float64):
    """Nested lists to `LossInputs`; `policy` may be a flat tensor with gradient."""
    policy = policy if isinstance(policy, torch.Tensor) else flat(policy, dtype)
    is_inside = flat(mask, torch.bool)
    return LossInputs(
        policy_logprobs=policy,
        denominator_logprobs=flat(denominator, dtype),
        behavior_logprobs=flat(behavior, dtype),
        anchor_logprobs=flat(denominator, dtype),
        sampling_anchor_logprobs=flat(denominator, dtype),
        log_rho=log_difference(flat(denominator, dtype), flat(behavior, dtype), is_inside),
        ages=torch.zeros(sum(map(len, mask)), dtype=torch.int64),
        advantages=advantages_of(advantages, mask).to(dtype),
        loss_mask=is_inside,
        sequence_ids=sequence_ids(mask),
        num_sequences=len(mask),
    )


def token_loss(name, inputs, **settings):
    """(token loss, diagnostics) of a loss by name."""
    table = LOSSES[name]
    function = load_function("loss.name", f"rollverify.losses.{table.function}")
    return function(inputs, table(**settings))


def correct(
    name, numerator, behavior, mask, *, policy=None, advantages=None, ages=None, **settings
):
    """A correction on nested lists; what it does not read may be left out."""
    zeros = [[0.0] * len(row) for row in mask]
    inputs = loss_inputs(policy or zeros, zeros, behavior, advantages or [0.0] * len(mask), mask)
    log_rho = log_difference(flat(numerator), inputs.behavior_logprobs, inputs.loss_mask)
    ages = inputs.ages if ages is None else flat(ages, torch.int64)
    inputs = replace(inputs, log_rho=log_rho, ages=ages)
    return CORRECTION_FUNCTIONS[name](inputs, CORRECTIONS[name](**settings))


def batch_weights(mode, mask, constant):
    """[T]; weights of the aggregation."""
    lengths = torch.tensor([sum(map(bool, row)) for row in mask])
    normalizer = Normalizer(
        mode=mode, counts=count_batch(lengths), constant_length=int(constant or 1)
    )
    # In float64: the weights are float32 numbers, good to 6e-8 of themselves.
    return normalizer.token_weights(flat(mask, torch.bool), sequence_ids(mask)).double()


def run(name, rows, *, aggregation, constant=None, correction=None, **settings):
    """(loss, gradient [T]) of the product; `rows` are policy, denominator, behavior, A, mask."""
    policy, denominator, behavior, advantages, mask = rows
    policy = flat(policy).requires_grad_()
    inputs = loss_inputs(policy, denominator, behavior, advantages, mask)
    if correction is not None and LOSSES[name].takes_weights:
        inputs = replace(inputs, correction_weights=correction.weights)
    values, _ = token_loss(name, inputs, **settings)
    if correction is not None and not LOSSES[name].takes_weights:
        values = correction.weights * values
    loss = (values * batch_weights(aggregation, mask, constant)).sum()
    loss.backward()
    return loss.item(), policy.grad


def random_rows(seed, spread=0.4):
    """Four sequences of 1 to 6 tokens; policy and denominator near behavior, a token masked."""
    generator = random.Random(seed)
    lengths = [generator.randint(1, 6) for _ in range(4)]
    behavior = [[-2.5 * generator.random() for _ in range(size)] for size in lengths]

    def moved(rows):
        return [[value + generator.gauss(0.0, spread) for value in row] for row in rows]

    denominator = moved(behavior)
    mask = [[int(generator.random() < 0.85) for _ in row] for row in behavior]
    mask[0][0] = 1
    return moved(denominator), denominator, behavior, [1.5, -0.7, -1.2, 0.4], mask
