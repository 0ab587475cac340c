"""Scoring without gradient, in threads and one row at a time, against the pass with gradient."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.tiny_models import (
    packed_row,
    random_documents,
    take_steps,
    tiny_folder,
    tiny_llama_folder,
    tiny_moe_folder,
    tiny_trainer,
)
from torch import Tensor

from torchtitan_ext.cpu.backend import uses_cpu
from torchtitan_ext.packed_rows import PackedRow
from torchtitan_ext.policy_trainer import PolicyTrainer

pytestmark = pytest.mark.skipif(not uses_cpu(), reason="threads are for CPUs")

ROWS = [
    packed_row(random_documents(lengths, seed=seed))
    for seed, lengths in enumerate([[9, 20, 5], [100], [2, 2, 64, 33], [31, 32]])
]
# Two layers in float32 with sums in another order, log-probs of size 10. Measured: 2e-6.
PARITY = 1e-5


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[PolicyTrainer]:
    trainer = tiny_trainer(tiny_folder(tmp_path / "model"), tmp_path / "run")
    yield trainer
    trainer.close()


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch._C.set_num_threads(2)
    yield
    torch._C.set_num_threads(before)


def with_gradient(trainer: PolicyTrainer, rows: list[PackedRow]) -> list[Tensor]:
    """Log-probs as training sees them."""
    found: list[Tensor] = []

    def loss(index: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
        found.append(logprobs.detach().clone())
        return 0.0 * logprobs.sum()

    trainer.forward_backward(rows, loss, temperature=0.7)
    trainer.optimizers.zero_grad()
    return found


@pytest.mark.parametrize("make_folder", [tiny_folder, tiny_llama_folder, tiny_moe_folder])
@pytest.mark.parametrize("head_dim", [32, 24])
def test_scores_are_those_of_the_training_pass(
    tmp_path: Path, make_folder: Callable[..., Path], head_dim: int
) -> None:
    """vLLM has no attention for heads of 24: torchtitan's own way is taken then."""
    trainer = tiny_trainer(make_folder(tmp_path / "m", head_dim=head_dim), tmp_path / "run")
    is_moe = make_folder is tiny_moe_folder
    assert trainer.rows_at_once == (2 if head_dim == 32 and not is_moe else 1)
    want = with_gradient(trainer, ROWS)
    for part in (slice(0, 4), slice(1, 2)):  # side by side, and one alone
        scores = trainer.score(ROWS[part], temperature=0.7)
        for score, expected in zip(scores, want[part], strict=True):
            torch.testing.assert_close(score, expected, atol=PARITY, rtol=0.0)
    trainer.close()


def test_scores_do_not_depend_on_the_number_of_rows_at_once(trainer: PolicyTrainer) -> None:
    scores = {}
    for num_threads, rows_at_once in ((2, 2), (3, 3), (9, 4)):
        torch._C.set_num_threads(num_threads)  # vLLM makes the public name a no-op
        assert trainer.rows_at_once == rows_at_once
        scores[num_threads] = trainer.score(ROWS)
        assert torch.get_num_threads() == num_threads
    assert all(torch.equal(a, b) for a, b in zip(scores[2], scores[3], strict=True))
    for a, b in zip(scores[2], scores[9], strict=True):  # two threads in each operation
        torch.testing.assert_close(a, b, atol=PARITY, rtol=0.0)


def test_scores_follow_the_weights(trainer: PolicyTrainer) -> None:
    """What a pass has gathered is not left for the next one."""
    before = trainer.score(ROWS)
    take_steps(trainer, 2)
    after = trainer.score(ROWS)
    assert (after[0] - before[0]).abs().max() > 0.01
    torch.testing.assert_close(after[1], trainer.score(ROWS[1:2])[0], atol=PARITY, rtol=0.0)


def test_an_error_in_a_row_comes_out_and_the_next_pass_is_right(trainer: PolicyTrainer) -> None:
    want = trainer.score(ROWS)
    broken = PackedRow(
        tokens=ROWS[0].tokens + 10_000, positions=ROWS[0].positions, targets=ROWS[0].targets
    )
    with pytest.raises(IndexError):
        trainer.score([*ROWS, broken])
    assert torch.get_num_threads() == 2
    assert all(torch.equal(a, b) for a, b in zip(trainer.score(ROWS), want, strict=True))


def test_a_document_beyond_the_rotary_table_is_refused(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model", max_position_embeddings=16)
    trainer = tiny_trainer(folder, tmp_path / "run", max_sequence_tokens=16)
    with pytest.raises(ValueError, match="a document of 99 tokens: the model has 16 positions"):
        trainer.score(ROWS)
    trainer.close()


def test_a_lower_precision_is_scored_row_by_row(tmp_path: Path) -> None:
    trainer = tiny_trainer(tiny_folder(tmp_path / "m"), tmp_path / "run", dtype="bfloat16")
    assert trainer.rows_at_once == 1
    want = with_gradient(trainer, ROWS)
    for score, expected in zip(trainer.score(ROWS, temperature=0.7), want, strict=True):
        torch.testing.assert_close(score, expected, atol=PARITY, rtol=0.0)
    trainer.close()
