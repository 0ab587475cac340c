"""The policy trainer on one process against transformers, and its state after a save and a load."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.tiny_models import (
    Reference,
    export,
    full_gradients,
    full_parameters,
    packed_row,
    random_documents,
    take_steps,
    tiny_folder,
    tiny_trainer,
)
from torch import Tensor

from torchtitan_ext.policy_trainer import PolicyTrainer

DOCUMENTS = random_documents([2, 40, 7, 7, 90, 23], seed=1)
# Two float32 forward passes of two layers in different orders of summation; log-probs of size 10
# carry steps of 1e-6 and a handful of roundings. Measured: 1e-6.
PARITY = 1e-5


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[PolicyTrainer]:
    folder = tiny_folder(tmp_path / "model")
    trainer = tiny_trainer(folder, tmp_path / "run")
    yield trainer
    trainer.close()


@pytest.mark.parametrize("tied", [True, False])
def test_logprobs_equal_transformers_after_training(tmp_path: Path, tied: bool) -> None:
    """WS01 on the trainer's side."""
    folder = tiny_folder(tmp_path / "model", tie_word_embeddings=tied)
    trainer = tiny_trainer(folder, tmp_path / "run")
    before = trainer.score([packed_row(DOCUMENTS)])[0]
    take_steps(trainer, 3)
    reference = Reference(export(trainer, tmp_path / "exported", folder))
    for temperature in (1.0, 0.7):
        want = torch.cat([reference.logprobs(ids, temperature) for ids in DOCUMENTS])
        got = trainer.score([packed_row(DOCUMENTS)], temperature=temperature)[0]
        torch.testing.assert_close(got.double(), want, atol=PARITY, rtol=0.0)
        assert got.dtype == torch.float32
    assert (trainer.score([packed_row(DOCUMENTS)])[0] - before).abs().max() > 0.1
    trainer.close()


def test_packed_row_equals_documents_scored_alone(trainer: PolicyTrainer) -> None:
    packed = trainer.score([packed_row(DOCUMENTS)])[0]
    alone = torch.cat(trainer.score([packed_row([ids]) for ids in DOCUMENTS]))
    torch.testing.assert_close(packed, alone, atol=PARITY, rtol=0.0)


def test_training_gradient_equals_transformers(trainer: PolicyTrainer, tmp_path: Path) -> None:
    trainer.forward_backward(
        [packed_row(DOCUMENTS)], lambda _, logprobs, __: -logprobs.mean(), temperature=0.7
    )
    gradient = dict(full_gradients(trainer))["layers.1.feed_forward.w2.weight"]
    model = Reference(tmp_path / "model").model
    losses = []
    for ids in DOCUMENTS:
        logits = model(input_ids=torch.tensor([ids[:-1]])).logits[0] / 0.7
        losses.append(-logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]))
    torch.cat(losses).mean().backward()
    want = model.model.layers[1].mlp.down_proj.weight.grad
    assert want.abs().max() > 1e-3
    # Sums of 163 tokens in float32, gradients of size 0.1.
    torch.testing.assert_close(gradient, want, atol=1e-6, rtol=1e-4)


def test_rows_add_up_to_one_row(trainer: PolicyTrainer) -> None:
    """AG05 on one rank: micro-batches do not change the gradient."""
    count = sum(len(ids) - 1 for ids in DOCUMENTS)

    def loss(_: int, logprobs: Tensor, __: Tensor) -> Tensor:
        return -logprobs.sum() / count

    whole = trainer.forward_backward([packed_row(DOCUMENTS)], loss)
    one = dict(full_gradients(trainer))
    trainer.optimizers.zero_grad()
    rows = [packed_row(DOCUMENTS[:2]), packed_row(DOCUMENTS[2:])]
    assert trainer.forward_backward(rows, loss).item() == pytest.approx(whole.item(), rel=1e-5)
    for name, gradient in full_gradients(trainer):
        # The same terms of size 0.1 summed in another order.
        torch.testing.assert_close(gradient, one[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_gradient_that_is_not_finite_leaves_parameters_alone(
    trainer: PolicyTrainer, factor: float
) -> None:
    take_steps(trainer, 1)
    before, step = full_parameters(trainer), trainer.step
    trainer.forward_backward([packed_row(DOCUMENTS)], lambda _, lp, __: lp.sum() * factor)
    with pytest.raises(FloatingPointError, match="gradient norm is"):
        trainer.optimizer_step()
    assert trainer.step == step
    assert all(torch.equal(t, before[name]) for name, t in trainer.hf_parameters())


def moments(trainer: PolicyTrainer) -> list[Tensor]:
    """Adam's first and second moments and step counts, in parameter order."""
    return [
        state[key].detach().clone()
        for optimizer in trainer.optimizers
        for state in optimizer.state.values()
        for key in ("exp_avg", "exp_avg_sq", "step")
    ]


@pytest.mark.parametrize("tied", [True, False])
def test_checkpoint_restores_weights_moments_and_schedule(tmp_path: Path, tied: bool) -> None:
    """DC07: warm-up of 10 steps to 1e-6; after 4 steps the next one uses 5e-7."""
    folder = tiny_folder(tmp_path / "model", tie_word_embeddings=tied)
    schedule = {"lr": 1e-6, "warmup_steps": 10}
    first = tiny_trainer(folder, tmp_path / "run", **schedule)
    assert take_steps(first, 4) == pytest.approx([1e-7, 2e-7, 3e-7, 4e-7])
    first.checkpointer.save(4)
    weights, adam = full_parameters(first), moments(first)
    again = tiny_trainer(folder, tmp_path / "other", **schedule)
    assert moments(again) == []
    again.checkpointer.folder = first.checkpointer.folder
    again.checkpointer.load(4)
    assert again.step == 4
    assert all(torch.equal(t, weights[name]) for name, t in again.hf_parameters())
    restored = moments(again)
    assert len(restored) == len(adam) > 0
    assert all(torch.equal(a, b) for a, b in zip(restored, adam, strict=True))
    assert take_steps(again, 1, seed=5) == take_steps(first, 1, seed=5) == pytest.approx([5e-7])
    after = full_parameters(first)
    assert all(torch.equal(t, after[name]) for name, t in again.hf_parameters())
    first.close()
    again.close()


def test_activation_checkpointing_changes_no_gradient_and_no_name(tmp_path: Path) -> None:
    """WS07: the wrapper's prefix stays out of the Hugging Face names."""
    folder = tiny_folder(tmp_path / "model")
    gradients, names = {}, {}
    for kind in ("none", "selective", "full"):
        trainer = tiny_trainer(folder, tmp_path / kind, activation_checkpoint=kind)
        wrapped = [n for n, _ in trainer.model.named_modules() if "_checkpoint_wrapped" in n]
        assert bool(wrapped) == (kind != "none")
        trainer.forward_backward([packed_row(DOCUMENTS)], lambda _, lp, entropy: -lp.mean())
        gradients[kind] = [gradient for _, gradient in full_gradients(trainer)]
        names[kind] = list(full_parameters(trainer))
        trainer.close()
    for kind in ("selective", "full"):
        assert names[kind] == names["none"]
        # Recomputation repeats the same operations on the same numbers.
        pairs = zip(gradients[kind], gradients["none"], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def test_weight_decay_and_clipping_reach_the_optimizer(tmp_path: Path) -> None:
    """AdamW without gradient shrinks a weight by lr * decay = 0.1 * 0.5 per step."""
    folder = tiny_folder(tmp_path / "model")
    trainer = tiny_trainer(folder, tmp_path / "run", lr=0.1, weight_decay=0.5, max_grad_norm=0.25)
    before = full_parameters(trainer)
    trainer.forward_backward([packed_row(DOCUMENTS)], lambda _, lp, __: lp.sum() * 0.0)
    assert trainer.optimizer_step()[0] == 0.0
    for name, tensor in trainer.hf_parameters():
        torch.testing.assert_close(tensor, before[name] * 0.95, atol=1e-7, rtol=1e-6)
    trainer.forward_backward([packed_row(DOCUMENTS)], lambda _, lp, __: -lp.mean())
    norm = torch.stack([g.norm() for _, g in full_gradients(trainer)]).norm().item()
    assert norm > 0.25
    # The reported norm is the one before clipping; one rounding of a sum of squares.
    assert trainer.optimizer_step()[0] == pytest.approx(norm, rel=1e-5)
    trainer.close()


def test_trained_tokens_are_counted_once_and_scored_ones_not(trainer: PolicyTrainer) -> None:
    row = packed_row(DOCUMENTS)
    trainer.score([row, row])
    assert trainer.ntokens_seen == 0
    trainer.forward_backward([row, row], lambda _, lp, __: lp.sum())
    assert trainer.ntokens_seen == 2 * row.tokens.numel()
