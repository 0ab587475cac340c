"""Terms and settings of the objective: denominators, masks, KL to a reference, entropy."""

from math import log

import pytest
import torch
from support.fakes import FakeTrainer, ScoringTrainer, trajectory
from tensordict import TensorDict
from unit.losses.objective_cases import OBJECTIVES, stale_batch, take_step

from rollverify.config.losses import Grpo, MaskStale, NoCorrection, Reinforce, Truncated
from rollverify.config.tables import AdvantageConfig, KlConfig
from rollverify.losses.advantages import CreditRule
from rollverify.losses.objective import Objective
from rollverify.metrics.names import is_declared
from rollverify.rollout.trajectory import Status

CENTRED = AdvantageConfig(std="none")


def equal_rewards() -> list[TensorDict]:
    """Two responses without signal, so that only the extra terms have a gradient."""
    return [trajectory([0], [1, 2, 3], sample=0), trajectory([4], [5, 0], sample=1)]


def one_token(behavior: float, anchor: float) -> list[TensorDict]:
    """Rewards 1 and 0, one token each, two steps old, offsets in nats from the policy now."""
    trainer, made = FakeTrainer(), []
    for sample, ids in enumerate(([0, 1], [2, 3])):
        own = torch.tensor(trainer.logprobs(ids))
        one = trajectory(ids[:1], ids[1:], reward=1.0 - sample, sample=sample)
        one["policy_version"] += 1
        one["behavior_logprobs"], one["anchor_logprobs"] = own + behavior, own + anchor
        made.append(one)
    return made


@pytest.mark.parametrize(
    ("denominator", "ratio", "weight"),
    [
        # The policy is 2 times the anchor at sampling and 8 times the engine's probability.
        ("anchor_now", 1.0, 8.0),
        ("anchor_at_sampling", 2.0, 4.0),
        ("behavior", 8.0, 8.0),  # The weight is measured from the policy before the step.
    ],
)
def test_the_denominator_divides_staleness_and_engine_gap(denominator, ratio, weight):
    correction = NoCorrection(threshold=100.0)
    objective = Objective(loss=Grpo(denominator=denominator), correction=correction)
    metrics = take_step(ScoringTrainer(), one_token(-log(8), -log(2)), objective)
    assert metrics["train/ratio_mean"] == pytest.approx(ratio, rel=1e-5)
    assert metrics["correction/weight_mean"] == pytest.approx(weight, rel=1e-5)
    # Apart from staleness the engine is 4 times below the trainer.
    assert metrics["mismatch/logprob_abs_mean"] == pytest.approx(log(4), rel=1e-5)


def test_a_fresh_token_has_the_policy_before_the_step_as_anchor():
    batch = one_token(0.0, float("nan"))
    objective = Objective(loss=Grpo(denominator="anchor_at_sampling"))
    assert take_step(ScoringTrainer(), batch, objective)["train/ratio_mean"] == 1.0


def test_the_weight_of_reinforce_follows_the_policy_inside_the_step():
    objective = Objective(loss=Reinforce(), correction=Truncated(threshold=100.0))
    metrics = take_step(ScoringTrainer(), one_token(-log(3), 0.0), objective)
    assert metrics["correction/weight_mean"] == pytest.approx(3.0, rel=1e-5)


def test_no_gradient_goes_through_the_weight_of_reinforce():
    """IR07: three times the gradient without a correction, not that of the product."""
    plain, weighted = ScoringTrainer(), ScoringTrainer()
    take_step(
        plain, one_token(-log(3), 0.0), Objective(loss=Reinforce(), correction=NoCorrection())
    )
    capped = Objective(loss=Reinforce(), correction=Truncated(threshold=100.0))
    take_step(weighted, one_token(-log(3), 0.0), capped)
    torch.testing.assert_close(weighted.gradient, 3 * plain.gradient, atol=1e-6, rtol=0)
    assert plain.gradient.abs().max() > 0.01


@pytest.mark.parametrize(("max_age", "share"), [(0, 1.0), (1, 1.0), (2, 0.0)])
def test_stale_tokens_are_masked_and_still_counted(max_age, share):
    """One token of version 1 each, trained at version 3."""
    objective = Objective(correction=MaskStale(max_age=max_age))
    trainer = ScoringTrainer()
    metrics = take_step(trainer, one_token(0.0, 0.0), objective)
    assert metrics["train/masked_frac"] == metrics["correction/masked_frac"] == share
    assert metrics["train/num_tokens"] == 2
    assert bool(trainer.gradient.abs().sum() > 0) == (share == 0.0)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_metric_is_declared_and_finite(name):
    metrics = take_step(ScoringTrainer(), stale_batch(), OBJECTIVES[name])
    assert [key for key in metrics if not is_declared(key)] == []
    assert torch.tensor(list(metrics.values())).isfinite().all()
    buckets = [value for key, value in metrics.items() if key.startswith("train/ratio_from")]
    assert sum(buckets) + metrics["train/ratio_below_0_5_frac"] == pytest.approx(1.0)


def gradient_of(term: object) -> torch.Tensor:
    """Of the mean of `term(all log-probs of a row of the table) [5, vocabulary]` over 5 tokens."""
    trainer = ScoringTrainer()
    rows, targets = torch.tensor([0, 1, 2, 4, 5]), torch.tensor([1, 2, 3, 5, 0])
    every = trainer.logits.log_softmax(-1)[rows]
    term(every, targets, rows).mean().backward()
    return trainer.logits.grad


def test_the_entropy_term_raises_the_entropy():
    trainer = ScoringTrainer()
    objective = Objective(loss=Grpo(entropy_coefficient=0.5))
    take_step(trainer, equal_rewards(), objective, aggregation="token_mean")
    right = gradient_of(lambda every, *_: 0.5 * (every.exp() * every).sum(-1))
    torch.testing.assert_close(trainer.gradient, right, atol=1e-7, rtol=0)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_term_pulls_to_the_reference(estimator):
    trainer, reference = ScoringTrainer(), ScoringTrainer(seed=5)
    objective = Objective(kl=KlConfig(coefficient=0.5, estimator=estimator))
    metrics = take_step(
        trainer, equal_rewards(), objective, reference=reference, aggregation="token_mean"
    )
    other = reference.logits.detach().log_softmax(-1)

    def term(every: torch.Tensor, targets: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        d = (every - other[rows]).gather(1, targets[:, None])[:, 0]
        return 0.5 * {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d}[estimator]

    torch.testing.assert_close(trainer.gradient, gradient_of(term), atol=1e-6, rtol=0)
    assert metrics["train/loss"] == pytest.approx(0.5 * metrics["train/kl_reference_nats"])


def test_without_a_kl_term_the_reference_is_not_asked():
    reference = ScoringTrainer()
    metrics = take_step(ScoringTrainer(), stale_batch(), Objective(), reference=reference)
    assert reference.scored_rows == []
    assert "train/kl_reference_nats" not in metrics


def pr21_group() -> list[TensorDict]:
    """Rewards 1, 0, 0, 1; sample 2 was cut at the limit."""
    return [
        trajectory(
            [0],
            [1, 2][: 1 + sample % 2],
            reward=reward,
            sample=sample,
            status=Status.LENGTH if sample == 2 else Status.STOP,
        )
        for sample, reward in enumerate([1.0, 0.0, 0.0, 1.0])
    ]


def test_pr21_truncated_responses_leave_the_loss_and_stay_in_the_statistics():
    """PR21: advantages of samples 0, 1, 3 are 0.5, -0.5, 0.5."""
    finished = pr21_group()
    rule = CreditRule(settings=CENTRED, max_response_tokens=4, mask_truncated=True)
    assert rule.advantages(finished).tolist() == [0.5, -0.5, -0.5, 0.5]
    trained = rule.trained(finished)
    assert [bool(one["loss_mask"].any()) for one in trained] == [True, True, False, True]
    assert all(bool(one["loss_mask"].all()) for one in finished)
    metrics = take_step(ScoringTrainer(), finished, Objective(), credit=rule)
    assert metrics["train/num_tokens"] == 1 + 2 + 2


def test_nothing_is_left_out_unless_asked_for():
    finished = pr21_group()
    assert CreditRule(max_response_tokens=4).trained(finished) is finished


def test_long_responses_are_penalised_before_the_group_is_compared():
    # Lengths 1, 2, 1, 2 of at most 2, buffer 2: excess 1/2, 1, 1/2, 1. Rewards 1, 0, 0, 1 become
    # 0.5, -1, -0.5, 0 with mean -0.25.
    settings = AdvantageConfig(std="none", overlong_buffer_tokens=2)
    rule = CreditRule(settings=settings, max_response_tokens=2)
    assert rule.advantages(pr21_group()).tolist() == [0.75, -0.75, -0.25, 0.25]
