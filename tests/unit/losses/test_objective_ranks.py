"""The same batch gives the same parameters for every split: micro-batches, packing, ranks."""

import pytest
import torch
from support.fakes import ScoringTrainer
from unit.losses import objective_worker
from unit.losses.objective_cases import MASKING, OBJECTIVES, RANK_CASES, stale_batch, take_step

from rollverify.config.losses import CORRECTIONS, LOSSES

SPLIT_KEYS = {"train/num_micro_batches"}
"""Metrics that say how the work was split."""


def step(name: str, **changes: object) -> tuple[torch.Tensor, dict[str, float]]:
    trainer = ScoringTrainer()
    metrics = take_step(trainer, stale_batch(), OBJECTIVES[name], **changes)
    return trainer.logits.detach(), metrics


def assert_same(got: tuple, want: tuple) -> None:
    # float32 log-probs near 2 nats: a few units of the last place, 2e-7 each.
    torch.testing.assert_close(got[0], want[0], atol=1e-6, rtol=0)
    values, right = ({k: v for k, v in m.items() if k not in SPLIT_KEYS} for _, m in (got, want))
    assert values == pytest.approx(right, abs=2e-6, rel=2e-6)


def test_every_loss_and_correction_is_covered():
    objectives = OBJECTIVES.values()
    assert {objective.loss.name for objective in objectives} == set(LOSSES)
    assert {objective.correction.name for objective in objectives} == set(CORRECTIONS)


@pytest.mark.parametrize("micro_batch_tokens", [1, 20])
@pytest.mark.parametrize("minibatches", [1, 4])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_step_does_not_depend_on_the_micro_batches(name, minibatches, micro_batch_tokens):
    """AG01; 1 token per row means that nothing is packed."""
    whole = step(name, minibatches=minibatches)
    assert whole[1]["train/num_micro_batches"] == minibatches
    split = step(name, minibatches=minibatches, micro_batch_tokens=micro_batch_tokens)
    assert split[1]["train/num_micro_batches"] > minibatches
    assert_same(split, whole)
    assert (whole[0] - ScoringTrainer().logits.detach()).abs().max() > 1e-3


@pytest.mark.parametrize("micro_batch_tokens", [1, 20])
@pytest.mark.parametrize("name", MASKING)
def test_a_denominator_that_shrinks_does_not_depend_on_the_micro_batches(name, micro_batch_tokens):
    """AG01; what is dropped is counted over the whole batch before the gradient."""
    whole = step(name, masked_in_denominator=False)
    small = step(name, masked_in_denominator=False, micro_batch_tokens=micro_batch_tokens)
    assert_same(small, whole)
    assert whole[1]["train/masked_frac"] > 0
    assert (step(name)[0] - whole[0]).abs().max() > 1e-4


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_step_does_not_depend_on_the_order(name):
    trainer = ScoringTrainer()
    batch = stale_batch()
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(2)).tolist()
    metrics = take_step(trainer, [batch[i] for i in order], OBJECTIVES[name], minibatches=2)
    assert_same((trainer.logits.detach(), metrics), step(name, minibatches=2))


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_step_does_not_depend_on_the_number_of_ranks(world_size, run_gloo_workers):
    """AG05, with ranks that hold unequal shares, one and two optimizer steps."""
    folder = run_gloo_workers(objective_worker.main, world_size)
    results = torch.load(folder / "results.pt")
    for (name, changes), result in zip(RANK_CASES, results, strict=True):
        assert_same(result, step(name, **changes))
