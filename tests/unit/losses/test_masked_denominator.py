"""Tokens that are dropped and the averages: they count, or the others weigh more.

Four equally likely tokens, so every log-prob of the policy is -log 4; rho = policy / behavior of
each token is set by the behavior's log-prob.
"""

from dataclasses import replace
from math import log

import pytest
import torch
from support.fakes import ScoringTrainer, trajectory
from tensordict import TensorDict
from unit.training.updates import policy_update

from rollverify.config.losses import Grpo, Icepop
from rollverify.losses.objective import Objective

ICEPOP = Objective(correction=Icepop(low=0.5, high=5.0))


def hand_case() -> list[TensorDict]:
    """Advantages 1/2 and -1/2 (centred only); rho 1, 10, 1 | 1 and 10 | 10."""
    return [
        trajectory([0], [1, 2, 3], reward=1.0, group=0, sample=0, logprobs=behavior(1, 10, 1)),
        trajectory([0], [3], reward=0.0, group=0, sample=1, logprobs=behavior(1)),
        trajectory([0], [1, 2], reward=1.0, group=1, sample=0, logprobs=behavior(10, 10)),
        trajectory([0], [3], reward=0.0, group=1, sample=1, logprobs=behavior(10)),
    ]


def behavior(*rho: float) -> list[float]:
    return [-log(4) - log(one) for one in rho]


def take(aggregation: str, finished: list[TensorDict], **changes: object) -> tuple:
    """(trainer, metrics) of one step."""
    trainer = ScoringTrainer(vocab_size=4)
    with torch.no_grad():
        trainer.logits.zero_()
    update = policy_update(trainer, aggregation=aggregation, **({"objective": ICEPOP} | changes))
    return trainer, update.train_step(finished, 0)


@pytest.mark.parametrize(
    ("aggregation", "counted", "expected"),
    [
        # Kept token losses -1/2, -1/2 | +1/2 of 3 and 1 tokens; 0 | 0 of 2 and 1 dropped tokens.
        ("token_mean", True, -0.5 / 7),
        ("token_mean", False, -0.5 / 3),
        ("sequence_mean", True, (-1 / 3 + 0.5) / 4),
        ("sequence_mean", False, (-1 / 2 + 0.5) / 2),
        ("constant_length", True, -0.5 / (4 * 4)),
        ("constant_length", False, -0.5 / (4 * 2)),
    ],
)
def test_the_loss_by_hand(aggregation, counted, expected):
    _, metrics = take(aggregation, hand_case(), masked_in_denominator=counted)
    assert metrics["train/loss"] == pytest.approx(expected, abs=1e-6)
    # 4 of 7 tokens are dropped, and 7 are in the loss, whatever they are divided by.
    assert metrics["train/masked_frac"] == pytest.approx(4 / 7)
    assert metrics["train/num_tokens"] == 7


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant_length"])
def test_dropped_tokens_are_as_if_they_were_outside_the_loss_mask(aggregation):
    outside = hand_case()
    for one in outside:
        one["loss_mask"] = one["behavior_logprobs"] > -log(4) - 1.0
    terms = {"objective": replace(ICEPOP, loss=Grpo(entropy_coefficient=0.3))}
    dropped, _ = take(aggregation, hand_case(), masked_in_denominator=False, **terms)
    left_out, _ = take(aggregation, outside, **terms)
    torch.testing.assert_close(dropped.gradient, left_out.gradient, atol=1e-7, rtol=0)
    assert dropped.gradient.abs().max() > 0.01


def test_a_batch_that_is_dropped_whole_gives_no_gradient():
    trainer, metrics = take("token_mean", hand_case()[2:], masked_in_denominator=False)
    assert metrics["train/loss"] == 0.0 and not trainer.gradient.any()


def test_the_policy_about_to_be_updated_says_what_is_dropped():
    """One scoring pass with one step; with two the second step scores its rows again."""
    one, _ = take("token_mean", hand_case(), masked_in_denominator=False)
    two, _ = take("token_mean", hand_case(), masked_in_denominator=False, minibatches=2)
    plain, _ = take("token_mean", hand_case())
    assert [len(t.scored_rows) for t in (one, two, plain)] == [1, 3, 0]
