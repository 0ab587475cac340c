"""One optimizer step of GRPO on a table of logits: values and gradients worked by hand."""

from math import exp, log

import pytest
import torch
from support.fakes import FakeTrainer, trajectory
from tensordict import TensorDict
from unit.training.updates import policy_update

from rollverify.config.losses import NoCorrection
from rollverify.config.tables import AdvantageConfig
from rollverify.hooks import StepState
from rollverify.losses.advantages import CreditRule
from rollverify.losses.objective import Objective
from rollverify.metrics.names import is_declared
from rollverify.verification.metrics import TrainedMetrics

UNIFORM = -log(4)
"""Log-prob of each of 4 equally likely tokens."""


def step(
    finished: list[TensorDict], trainer: FakeTrainer | None = None, **changes: object
) -> tuple[FakeTrainer, dict[str, float]]:
    trainer = trainer or FakeTrainer()
    return trainer, policy_update(trainer, **changes).train_step(finished, 0)


def uniform_trainer() -> FakeTrainer:
    """Four equally likely tokens, whatever comes before."""
    trainer = FakeTrainer(vocab_size=4)
    with torch.no_grad():
        trainer.logits.zero_()
    return trainer


def hand_case() -> list[TensorDict]:
    """Rewards 1 and 0, so advantages 1/2 and -1/2; anchor / behavior is 1.5, 3 and 0.5."""
    right = [UNIFORM - log(1.5), UNIFORM - log(3)]
    return [
        trajectory([0], [1, 2], reward=1.0, sample=0, logprobs=right),
        trajectory([0], [3], reward=0.0, sample=1, logprobs=[UNIFORM - log(0.5)]),
    ]


def random_batch() -> list[TensorDict]:
    """Four groups of three, lengths 1 to 7, rewards 0, 0.5 or 1, none without signal."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for group in range(4):
        for sample in range(3):
            size = int(torch.randint(1, 8, (1,), generator=generator))
            ids = torch.randint(0, 6, (size + 2,), generator=generator).tolist()
            logprobs = (-2 * torch.rand(size, generator=generator)).tolist()
            made.append(
                trajectory(ids[:2], ids[2:], reward=sample / 2, group=group, logprobs=logprobs)
            )
    return made


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # Token losses -A w: -0.5 * 1.5 = -0.75, -0.5 * 2 = -1 (3 cut to 2), +0.5 * 0.5 = 0.25.
        ("token_mean", (-0.75 - 1.0 + 0.25) / 3),
        ("sequence_mean", ((-0.75 - 1.0) / 2 + 0.25) / 2),
        ("constant_length", (-0.75 - 1.0 + 0.25) / (4 * 2)),
    ],
)
def test_loss_by_hand(aggregation, expected):
    _, metrics = step(hand_case(), uniform_trainer(), aggregation=aggregation)
    assert metrics["train/loss"] == pytest.approx(expected, abs=1e-6)


def test_gradient_by_hand():
    # d logp(target) / d logits = onehot(target) - 1/4 in the row of the token before it.
    # Row 0: -0.75/3 (e1 - 1/4) + 0.25/3 (e3 - 1/4). Row 1: -1/3 (e2 - 1/4). SGD moves e2 up.
    trainer, metrics = step(hand_case(), uniform_trainer())
    first = torch.tensor([2.0, -10.0, 2.0, 6.0], dtype=torch.float64) / 48
    second = torch.tensor([1.0, 1.0, -3.0, 1.0], dtype=torch.float64) / 12
    expected = torch.stack([first, second, torch.zeros(4), torch.zeros(4)])
    torch.testing.assert_close(trainer.gradient, expected, atol=1e-6, rtol=0)
    assert metrics["train/grad_norm"] == pytest.approx(expected.norm().item(), abs=1e-6)
    assert metrics["train/lr"] == 1.0


def test_metrics_by_hand():
    _, metrics = step(hand_case(), uniform_trainer())
    # k3 of rho = 1.5, 3, 0.5 is rho - 1 - ln rho: 0.094535 + 0.901388 + 0.193147 = 1.189070.
    expected = {
        "train/ratio_mean": 1.0,
        "train/kl_estimate": 0.0,
        "train/clip_low_frac": 0.0,
        "train/clip_high_frac": 0.0,
        "train/entropy_nats": log(4),
        "correction/weight_mean": (1.5 + 2.0 + 0.5) / 3,
        "correction/truncated_frac": 1 / 3,
        "mismatch/logprob_abs_mean": (log(1.5) + log(3) + log(2)) / 3,
        "mismatch/logprob_abs_max": log(3),
        "mismatch/k3_nats": 1.189070 / 3,
        "train/num_tokens": 3,
        "train/num_micro_batches": 1,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, abs=1e-5)
    assert all(is_declared(key) for key in metrics)


def test_without_correction_the_weights_are_measured_but_not_applied():
    objective = Objective(correction=NoCorrection())
    _, metrics = step(hand_case(), uniform_trainer(), objective=objective)
    assert metrics["train/loss"] == pytest.approx((-0.5 - 0.5 + 0.5) / 3, abs=1e-6)
    assert metrics["correction/weight_mean"] == pytest.approx((1.5 + 2.0 + 0.5) / 3, abs=1e-6)
    assert metrics["correction/truncated_frac"] == pytest.approx(1 / 3)
    # Weights 1.5, 2, 0.5: (4)^2 / (3 * (2.25 + 4 + 0.25)).
    assert metrics["correction/effective_sample_frac"] == pytest.approx(16 / 19.5, abs=1e-6)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant_length"])
@pytest.mark.parametrize("micro_batch_tokens", [1, 9, 20, 1000])
def test_gradient_does_not_depend_on_the_micro_batches(aggregation, micro_batch_tokens):
    """AG01: one trajectory per row, some, or all in one row."""
    batch = random_batch()
    one_row, metrics = step(batch, aggregation=aggregation, micro_batch_tokens=1000)
    assert metrics["train/num_micro_batches"] == 1
    split, again = step(batch, aggregation=aggregation, micro_batch_tokens=micro_batch_tokens)
    torch.testing.assert_close(split.gradient, one_row.gradient, atol=1e-6, rtol=0)
    assert again["train/loss"] == pytest.approx(metrics["train/loss"], abs=1e-6)
    assert one_row.gradient.abs().max() > 1e-3
    assert split.num_rows == {1: 12, 1000: 1}.get(micro_batch_tokens, split.num_rows)


def test_gradient_does_not_depend_on_the_order_of_trajectories():
    batch = random_batch()
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(2)).tolist()
    sorted_, metrics = step(batch, micro_batch_tokens=12)
    mixed, again = step([batch[i] for i in order], micro_batch_tokens=12)
    torch.testing.assert_close(mixed.gradient, sorted_.gradient, atol=1e-6, rtol=0)
    assert again["mismatch/k3_nats"] == pytest.approx(metrics["mismatch/k3_nats"], abs=1e-6)


@pytest.mark.parametrize("std", ["unbiased", "population", "none"])
def test_groups_without_signal_give_no_gradient(std):
    """AD01: all right, all wrong, and a group of one."""
    batch = [trajectory([0], [1, 2], reward=1.0, group=0) for _ in range(3)]
    batch += [trajectory([0], [2, 3], reward=0.0, group=1) for _ in range(3)]
    batch += [trajectory([0], [4], reward=0.7, group=2)]
    credit = CreditRule(settings=AdvantageConfig(std=std), max_response_tokens=4)
    trainer, metrics = step(batch, credit=credit)
    assert torch.count_nonzero(trainer.gradient) == 0
    assert metrics["train/loss"] == 0.0
    assert metrics["train/num_tokens"] == 3 * 2 + 3 * 2 + 1


def test_advantages_are_taken_within_each_group():
    """Two groups of equal rewards inside, different between: no signal, not a contrast."""
    batch = [trajectory([0], [1], reward=float(group), group=group) for group in (0, 0, 1, 1)]
    trainer, _ = step(batch)
    assert torch.count_nonzero(trainer.gradient) == 0


def test_tokens_outside_the_loss_mask_neither_count_nor_pull():
    batch = hand_case()
    batch[0]["loss_mask"] = torch.tensor([False, True])
    trainer, metrics = step(batch, uniform_trainer())
    assert metrics["train/num_tokens"] == 2
    assert metrics["train/loss"] == pytest.approx((-1.0 + 0.25) / 2, abs=1e-6)
    # Row 0 gets only the second trajectory's 0.25/2 (e3 - 1/4).
    expected = torch.tensor([-1.0, -1.0, -1.0, 3.0], dtype=torch.float64) / 32
    torch.testing.assert_close(trainer.gradient[0], expected, atol=1e-6, rtol=0)


def test_log_probs_are_taken_at_the_sampling_temperature():
    """LP01: behavior log-probs made at T = 0.5 match a trainer that divides by 0.5."""
    trainer = FakeTrainer()
    batch = [
        trajectory([0], ids, reward=reward, logprobs=trainer.logprobs([0, *ids], temperature=0.5))
        for ids, reward in (([1, 2], 1.0), ([3, 4], 0.0))
    ]
    _, metrics = step(batch, trainer, temperature=0.5)
    assert trainer.temperatures == [0.5]
    assert metrics["mismatch/logprob_abs_max"] < 1e-6
    _, raw = step(batch, FakeTrainer(), temperature=1.0)
    assert raw["mismatch/logprob_abs_max"] > 0.1


def test_an_on_policy_step_raises_the_better_answer():
    trainer = FakeTrainer()
    answers = {(1, 2): 1.0, (3, 4): 0.0}
    before = {ids: sum(trainer.logprobs([0, *ids])) for ids in answers}
    batch = [
        trajectory([0], ids, reward=reward, logprobs=trainer.logprobs([0, *ids]))
        for ids, reward in answers.items()
    ]
    step(batch, trainer)
    after = {ids: sum(trainer.logprobs([0, *ids])) for ids in answers}
    assert after[(1, 2)] > before[(1, 2)]
    assert after[(3, 4)] < before[(3, 4)]


def stale_case(trainer: FakeTrainer) -> list[TensorDict]:
    """Two trajectories whose first token is of version 2 and has an anchor, trained at version 3.

    The engine agreed with the policy of version 2, which was ln 2 away from the one now.
    """
    made = []
    for sample, ids in enumerate(([0, 1, 2], [0, 3, 4])):
        logprobs = trainer.logprobs(ids)
        old, fresh = logprobs[0] - log(2), logprobs[1] + 0.25
        one = trajectory(ids[:1], ids[1:], reward=1.0 - sample, sample=sample, version=3)
        one["behavior_logprobs"] = torch.tensor([old, fresh])
        one["anchor_logprobs"] = torch.tensor([old, float("nan")])
        one["policy_version"] = torch.tensor([2, 3], dtype=torch.int32)
        one["segment_ids"] = torch.tensor([0, 1], dtype=torch.int32)
        made.append(one)
    return made


def step_at(
    version: int, finished: list[TensorDict], trainer: FakeTrainer, **changes: object
) -> dict[str, float]:
    """Metrics of the step and of what it was taken on."""
    update = policy_update(trainer, **changes)
    metrics = update.train_step(finished, version)
    state = StepState(step=version + 1, policy_version=version + 1)
    TrainedMetrics(trainer=update)(state)
    return metrics | state.metrics


def test_engine_mismatch_is_apart_from_staleness():
    trainer = FakeTrainer()
    metrics = step_at(3, stale_case(trainer), trainer)
    assert metrics["mismatch/logprob_abs_max"] == pytest.approx(0.25, abs=1e-6)
    assert metrics["mismatch/logprob_abs_mean"] == pytest.approx((0 + 0.25) / 2, abs=1e-6)
    assert metrics["mismatch/age_1"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["ops/trained_age_1"] == pytest.approx(2 - 1, abs=1e-6)
    assert metrics["ops/trained_age_0"] == 0.0
    # The weight is taken against the policy now: 2, cut to 2, and exp(-0.25).
    assert metrics["correction/weight_mean"] == pytest.approx((2 + exp(-0.25)) / 2, abs=1e-5)


def test_older_tokens_without_an_anchor_are_left_out_of_the_mismatch():
    """They can only be compared with the policy now, and that is staleness, not mismatch."""
    trainer = FakeTrainer()
    finished = stale_case(trainer)
    for one in finished:
        one["anchor_logprobs"] = torch.full((2,), float("nan"))
    metrics = step_at(3, finished, trainer)
    # Per trajectory only the fresh token, off by 0.25; the old one is ln 2 from the policy now.
    assert metrics["mismatch/logprob_abs_max"] == pytest.approx(0.25, abs=1e-6)
    assert metrics["mismatch/logprob_abs_mean"] == pytest.approx(0.25, abs=1e-6)
    assert "mismatch/age_1" not in metrics
    assert metrics["ops/trained_age_1"] == pytest.approx(2 - 1, abs=1e-6)


def test_anchors_change_no_loss_and_no_gradient():
    trainer, plain = FakeTrainer(), FakeTrainer()
    with_anchors, without = stale_case(trainer), stale_case(plain)
    for one in without:
        one["anchor_logprobs"] = torch.full((2,), float("nan"))
    metrics = policy_update(trainer).train_step(with_anchors, 3)
    again = policy_update(plain).train_step(without, 3)
    assert metrics["train/loss"] == again["train/loss"]
    assert torch.equal(trainer.gradient, plain.gradient)


@pytest.mark.parametrize("micro_batch_tokens", [1, 9, 1000])
def test_ops_find_their_trajectory_in_any_packing(micro_batch_tokens):
    """Each response token of trajectory i is of version i, so its age names it."""
    batch, trainer = random_batch(), FakeTrainer()
    for version, one in enumerate(batch):
        one["policy_version"].fill_(version)
        one["anchor_logprobs"] = one["behavior_logprobs"].clone()
    shift = {}
    for one in batch[-3:]:
        ids = torch.cat([one["prompt_ids"], one["response_ids"]]).tolist()
        own = torch.tensor(trainer.logprobs(ids)[1:])
        shift[11 - int(one["policy_version"][0])] = (own - one["anchor_logprobs"]).expm1().abs()
    metrics = step_at(11, batch, trainer, micro_batch_tokens=micro_batch_tokens)
    for age, values in shift.items():
        assert metrics[f"ops/trained_age_{age}"] == pytest.approx(values.mean().item(), abs=1e-5)
