"""The reference of a KL term: start weights whatever the policy has become."""

from pathlib import Path

import pytest
import torch
from support.tiny_models import (
    full_parameters,
    packed_row,
    random_documents,
    take_steps,
    tiny_folder,
    tiny_trainer,
)

from torchtitan_ext.reference_policy import ReferencePolicy


@pytest.mark.parametrize("tied", [True, False])
def test_the_reference_keeps_the_start_weights(tmp_path: Path, tied: bool) -> None:
    folder = tiny_folder(tmp_path / "model", tie_word_embeddings=tied)
    trainer = tiny_trainer(folder, tmp_path / "run")
    rows = [packed_row(random_documents([9, 20, 5], seed=3))]
    start = trainer.score(rows, temperature=0.7)
    take_steps(trainer, 2)
    now, weights = trainer.score(rows, temperature=0.7), full_parameters(trainer)
    reference = ReferencePolicy(trainer)  # Made late, as in a run that is resumed.
    assert (now[0] - start[0]).abs().max() > 0.01
    assert torch.equal(reference.score(rows, temperature=0.7)[0], start[0])
    assert torch.equal(trainer.score(rows, temperature=0.7)[0], now[0])
    after = full_parameters(trainer)
    assert all(torch.equal(after[name], weights[name]) for name in weights)
    trainer.close()


def test_training_goes_on_as_without_a_reference(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model")
    rows = [packed_row(random_documents([9, 20], seed=3))]
    results = []
    for has_reference in (False, True):
        trainer = tiny_trainer(folder, tmp_path / f"run_{has_reference}")
        reference = ReferencePolicy(trainer) if has_reference else None
        for step in range(3):
            if reference is not None:
                reference.score(rows, temperature=1.0)
            take_steps(trainer, 1, seed=step)
        results.append(full_parameters(trainer))
        trainer.close()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_an_earlier_step_of_an_iteration_leaves_schedule_and_count(tmp_path: Path) -> None:
    trainer = tiny_trainer(
        tiny_folder(tmp_path / "model"), tmp_path / "run", steps=10, lr_decay="linear"
    )
    row = packed_row(random_documents([9, 20, 5], seed=3))
    seen = []
    for is_last in (False, False, True, True):
        before = full_parameters(trainer)
        trainer.forward_backward([row], lambda _, logprobs, entropy: -logprobs.mean())
        _, rate = trainer.optimizer_step(is_last=is_last)
        seen.append((trainer.step, rate))
        after = full_parameters(trainer)
        assert any(not torch.equal(after[name], before[name]) for name in after)
    steps, rates = zip(*seen, strict=True)
    assert steps == (0, 0, 1, 2)
    assert rates[0] == rates[1] == rates[2] > rates[3]
    trainer.close()
