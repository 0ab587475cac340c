"""Several optimizer steps per iteration: whole groups in order, a ratio that moves."""

import pytest
import torch
from support.fakes import ScoringTrainer, trajectory
from tensordict import TensorDict
from unit.training.updates import policy_update

from rollverify.config.losses import Grpo, M2po, NoCorrection, Reinforce, Truncated
from rollverify.losses.objective import Objective
from rollverify.training.policy_update import PolicyUpdate

WIDE = {"objective": Objective(loss=Grpo(clip_low=0.2, clip_high=0.3))}


class RecordingTrainer(ScoringTrainer):
    """Keeps what each optimizer step was told, and its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.is_last: list[bool] = []
        self.gradients: list[torch.Tensor] = []

    def optimizer_step(self, *, is_last: bool = True) -> tuple[float, float]:
        self.is_last.append(is_last)
        result = super().optimizer_step(is_last=is_last)
        self.gradients.append(self.gradient)
        return result


def groups(count: int = 4) -> list[TensorDict]:
    """Groups of two responses of three tokens, one right; log-probs are those of the policy."""
    trainer, made = ScoringTrainer(), []
    for group in range(count):
        for sample in range(2):
            ids = [group % 6, (group + sample) % 6, (2 * group + 1) % 6, (group + 3 * sample) % 6]
            made.append(
                trajectory(
                    ids[:1],
                    ids[1:],
                    reward=float(sample),
                    group=group,
                    sample=sample,
                    logprobs=trainer.logprobs(ids),
                )
            )
    return made


def update(trainer: ScoringTrainer, minibatches: int, **changes: object) -> PolicyUpdate:
    return policy_update(trainer, minibatches=minibatches, **(WIDE | changes))


def test_each_step_takes_as_many_whole_groups_in_order():
    trainer, batch = RecordingTrainer(), groups()
    metrics = update(trainer, 2).train_step(batch[::-1], 0)
    first = RecordingTrainer()
    update(first, 1).train_step(batch[:4], 0)  # Groups 0 and 1 alone.
    torch.testing.assert_close(trainer.gradients[0], first.gradients[0], atol=1e-7, rtol=0)
    assert trainer.is_last == [False, True]
    assert metrics["train/num_tokens"] == 4 * 2 * 3
    norms = [gradient.norm().item() for gradient in trainer.gradients]
    assert metrics["train/grad_norm"] == pytest.approx(sum(norms) / 2)


def test_the_ratio_moves_from_the_second_step_on():
    trainer, batch = RecordingTrainer(), groups(2)
    metrics = update(trainer, 2).train_step(batch, 0)
    once = RecordingTrainer()
    before = [once.logprobs([*one["prompt_ids"], *one["response_ids"]]) for one in batch[2:]]
    update(once, 1).train_step(batch[:2], 0)
    after = [once.logprobs([*one["prompt_ids"], *one["response_ids"]]) for one in batch[2:]]
    ratios = (torch.tensor(after) - torch.tensor(before)).exp()
    # 6 tokens of ratio 1 in the first step, 6 that have moved in the second.
    assert metrics["train/ratio_mean"] == pytest.approx((6 + ratios.sum().item()) / 12, abs=1e-6)
    assert (ratios - 1).abs().max() > 0.01
    assert metrics["train/ratio_from_0_95_frac"] < 1.0


def test_steps_compare_with_the_policy_before_the_iteration():
    """OPS and mismatch are those of one step: nothing was sampled in between."""
    one = update(RecordingTrainer(), 1).train_step(groups(), 0)
    several = update(RecordingTrainer(), 4).train_step(groups(), 0)
    keys = [key for key in one if key.startswith(("ops/", "mismatch/", "correction/", "stale"))]
    assert len(keys) > 10
    expected = {key: one[key] for key in keys}
    assert {key: several[key] for key in keys} == pytest.approx(expected, abs=1e-6)


def test_one_step_scores_nothing_and_several_score_once():
    plain, several = RecordingTrainer(), RecordingTrainer()
    update(plain, 1).train_step(groups(), 0)
    update(several, 2).train_step(groups(), 0)
    assert plain.scored_rows == [] and plain.is_last == [True]
    assert len(several.scored_rows) == 2


def test_the_limit_of_m2po_is_taken_from_the_policy_about_to_be_updated():
    trainer = RecordingTrainer()
    objective = Objective(loss=M2po(denominator="behavior"), correction=NoCorrection())
    metrics = update(trainer, 2, objective=objective).train_step(groups(), 0)
    assert len(trainer.scored_rows) == 3  # Both before the first step, the second again.
    assert metrics["train/masked_frac"] <= 1.0 and trainer.gradients[1].abs().max() > 0


def test_the_loss_is_the_mean_over_the_steps():
    """REINFORCE without a correction knows no anchor, so two iterations of one step do the same."""
    plain = Objective(loss=Reinforce(), correction=NoCorrection())
    batch, trainer, other = groups(), RecordingTrainer(), RecordingTrainer()
    metrics = update(trainer, 2, objective=plain).train_step(batch, 0)
    apart = [
        update(other, 1, objective=plain).train_step(part, 0)["train/loss"]
        for part in (batch[:4], batch[4:])
    ]
    assert metrics["train/loss"] == pytest.approx(sum(apart) / 2, abs=1e-6)
    torch.testing.assert_close(trainer.logits, other.logits, atol=1e-6, rtol=0)


def test_the_weight_of_reinforce_moves_with_the_policy():
    """The engine agreed with the policy before the iteration, so the weight is the ratio."""
    plain = Objective(loss=Reinforce(), correction=Truncated(threshold=100.0))
    metrics = update(RecordingTrainer(), 2, objective=plain).train_step(groups(), 0)
    assert metrics["correction/weight_mean"] == pytest.approx(metrics["train/ratio_mean"], abs=1e-6)
    assert abs(metrics["correction/weight_mean"] - 1.0) > 1e-3
