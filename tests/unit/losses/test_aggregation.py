"""Weights of tokens in the batch loss: hand-worked means, any split, any number of ranks."""

import json

import pytest
import torch
from unit.losses import sgd_worker

from rollverify.losses.aggregation import BatchCounts, Normalizer, count_batch

MODES = ("token_mean", "sequence_mean", "constant_length")


def whole_batch_loss(mode, sequences, rows):
    """Loss and gradient when `rows` (lists of sequence indices) are the packed micro-batches."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    normalizer = Normalizer(mode=mode, counts=count_batch(lengths), constant_length=3)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    total = 0.0
    for row in rows:
        losses = torch.tensor([loss for index in row for loss in sequences[index]])
        ids = torch.tensor([slot for slot, index in enumerate(row) for _ in sequences[index]])
        weights = normalizer.token_weights(torch.ones_like(ids, dtype=torch.bool), ids)
        loss = (scale * losses * weights).sum()
        loss.backward()
        total += loss.item()
    return total, scale.grad.item()


def test_ag01_token_mean_is_over_all_micro_batches():
    # (1 + 1 + 1 + 4) / 4 = 1.75; the mean of the two micro-batch means would be 2.5.
    loss, _ = whole_batch_loss("token_mean", [[1.0, 1.0, 1.0], [4.0]], rows=[[0], [1]])
    assert loss == pytest.approx(1.75, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]])
def test_ag01_the_split_into_micro_batches_does_not_matter(mode, rows):
    # Token sums 3, 4, 5, 13 of lengths 3, 1, 2, 2:
    # token_mean 25 / 8; sequence_mean (1 + 4 + 2.5 + 6.5) / 4; constant_length 25 / (3 * 4).
    expected = {"token_mean": 3.125, "sequence_mean": 3.5, "constant_length": 2.083333}
    sequences = [[1.0, 1.0, 1.0], [4.0], [2.0, 3.0], [6.0, 7.0]]
    loss, gradient = whole_batch_loss(mode, sequences, rows)
    assert loss == pytest.approx(expected[mode], abs=1e-6)
    assert gradient == pytest.approx(expected[mode], abs=1e-6)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", 3.25),  # (1 + 4 + 4 + 4) / 4
        ("sequence_mean", 2.5),  # (1 + 4) / 2
        ("constant_length", 13 / 6),  # (1 + 12) / (3 * 2)
    ],
)
def test_ag03_the_mode_names_the_mean(mode, expected):
    loss, _ = whole_batch_loss(mode, [[1.0], [4.0, 4.0, 4.0]], rows=[[0, 1]])
    assert loss == pytest.approx(expected, abs=1e-6)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_ag05_the_number_of_ranks_does_not_matter(world_size, run_gloo_workers):
    # Inputs 1..8 in sequences of 3, 1, 2, 2: gradient of parameter * input is the mean input.
    # token 36 / 8; sequence (2 + 4 + 5.5 + 7.5) / 4; constant 36 / (3 * 4). Step from 0, lr 1.
    folder = run_gloo_workers(sgd_worker.main, world_size)
    parameters = json.loads((folder / "parameters.json").read_text())
    expected = {"token_mean": -4.5, "sequence_mean": -4.75, "constant_length": -3.0}
    assert parameters == pytest.approx(expected, abs=1e-6)


def test_sequences_without_loss_tokens_do_not_count():
    assert count_batch(torch.tensor([3, 0, 1, 0])) == BatchCounts(num_tokens=4, num_sequences=2)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # 5 tokens, 2 sequences globally; masks leave 2 of sequence 0 and 1 of sequence 1 here.
        ("token_mean", [0.2, 0.0, 0.2, 0.2, 0.0]),
        ("sequence_mean", [0.25, 0.0, 0.25, 0.5, 0.0]),
        ("constant_length", [0.05, 0.0, 0.05, 0.05, 0.0]),
    ],
)
def test_masked_tokens_have_weight_zero_and_do_not_lengthen_their_sequence(mode, expected):
    normalizer = Normalizer(
        mode=mode, counts=BatchCounts(num_tokens=5, num_sequences=2), constant_length=10
    )
    mask = torch.tensor([True, False, True, True, False])
    weights = normalizer.token_weights(mask, torch.tensor([0, 0, 0, 1, -1]))
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx(expected, abs=1e-7)


def test_sequence_ids_may_be_any_numbers():
    # Two sequences of 1 and 2 tokens, numbered far beyond the length of the row.
    counts = BatchCounts(num_tokens=3, num_sequences=2)
    normalizer = Normalizer(mode="sequence_mean", counts=counts, constant_length=10)
    weights = normalizer.token_weights(torch.ones(3).bool(), torch.tensor([250, -7, -7]))
    assert weights.tolist() == pytest.approx([0.5, 0.25, 0.25], abs=1e-7)


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_loss_tokens_has_weights_zero(mode):
    counts = count_batch(torch.tensor([0, 0]))
    normalizer = Normalizer(mode=mode, counts=counts, constant_length=10)
    weights = normalizer.token_weights(torch.zeros(4, dtype=torch.bool), torch.zeros(4).long())
    assert weights.tolist() == [0.0] * 4
