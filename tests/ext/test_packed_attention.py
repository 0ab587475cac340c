"""Packed attention on the CPU against a literal masked softmax, one document at a time.

Dimension letters: T tokens, N query heads, K key/value heads, H head size.
"""

import itertools

import pytest
import torch
from torch import Tensor
from torchtitan.models.common.attention import VarlenMetadata

from torchtitan_ext.cpu.attention import PackedSDPA, bucket_documents

HEAD_DIM = 8
# Scores and outputs of size 1 in float32: products of at most 130 terms, error near 1e-6.
TOLERANCE = {"atol": 5e-6, "rtol": 1e-5}


def metadata(lengths: list[int]) -> VarlenMetadata:
    """Document boundaries as torchtitan hands them over."""
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return VarlenMetadata(bounds, bounds, max(lengths), max(lengths))


def tensors(lengths: list[int], heads: int, kv_heads: int, seed: int = 0) -> list[Tensor]:
    """q [1, T, N, H], k and v [1, T, K, H] with gradient."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, sum(lengths), n, HEAD_DIM, generator=generator).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]


def per_document(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """[1, T, N, H] by the textbook formula, in float64."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
    outputs, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        scores = torch.einsum("bqnh,bknh->bnqk", q[:, part], k[:, part]) / HEAD_DIM**0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("bnqk,bknh->bqnh", weights, v[:, part]))
        start += length
    return torch.cat(outputs, dim=1)


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], **kwargs: object) -> Tensor:
    attention = PackedSDPA.Config().build()
    gqa = q.shape[2] != k.shape[2]
    return attention(q, k, v, attention_masks=metadata(lengths), enable_gqa=gqa, **kwargs)


ROWS = [[1], [5], [1, 1, 1], [3, 40, 7, 7, 1, 130, 16, 17, 2], [64, 1, 64]]


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("lengths", ROWS, ids=str)
def test_equals_full_attention_of_each_document(
    lengths: list[int], heads: int, kv_heads: int
) -> None:
    ours, literal = tensors(lengths, heads, kv_heads), tensors(lengths, heads, kv_heads)
    got = attend(*ours, lengths)
    want = per_document(*literal, lengths)
    torch.testing.assert_close(got, want.float(), **TOLERANCE)
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(9))
    (got * weights).sum().backward()
    (want * weights).sum().backward()
    for mine, theirs in zip(ours, literal, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, **TOLERANCE)


def test_documents_do_not_see_each_other() -> None:
    lengths = [6, 9, 4]
    q, k, v = tensors(lengths, 2, 1)
    before = attend(q, k, v, lengths)
    with torch.no_grad():
        k[:, :6] += 1.0
        v[:, :6] -= 2.0
    after = attend(q, k, v, lengths)
    assert not torch.equal(before[:, :6], after[:, :6])
    assert torch.equal(before[:, 6:], after[:, 6:])


def test_each_row_gets_its_own_plan() -> None:
    """The gather plan is remembered between layers; another row of that length needs another."""
    q, k, v = tensors([12], 2, 2)
    for lengths in ([12], [5, 7], [7, 5], [12]):
        want = per_document(q, k, v, lengths).float()
        torch.testing.assert_close(attend(q, k, v, lengths), want, **TOLERANCE)


def test_batch_of_rows_is_read_as_one_flat_row() -> None:
    q, k, v = tensors([4, 4, 2, 2], 2, 2)
    flat = attend(q, k, v, [4, 4, 2, 2])
    two = [t.detach().view(2, 6, 2, HEAD_DIM) for t in (q, k, v)]
    torch.testing.assert_close(attend(*two, [4, 4, 2, 2]).view(flat.shape), flat, atol=0, rtol=0)


def test_scale_replaces_the_default() -> None:
    q, k, v = tensors([7], 2, 2)
    # Scores q k / sqrt(8) * 0.5 are those of q / 2 at the default scale.
    got = attend(q, k, v, [7], scale=0.5 / HEAD_DIM**0.5)
    torch.testing.assert_close(got, per_document(q / 2, k, v, [7]).float(), **TOLERANCE)


def test_unsupported_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="causal only"):
        PackedSDPA.Config(window_size=(16, 0)).build()
    with pytest.raises(ValueError, match="block_table"):
        attend(*tensors([3], 2, 2), [3], block_table=torch.zeros(1))


def test_buckets_hold_every_document_once_and_bound_the_padding() -> None:
    lengths = [3, 40, 7, 7, 1, 130, 16, 17, 2, 128, 60]
    groups = bucket_documents(lengths)
    assert sorted(itertools.chain(*groups)) == list(range(len(lengths)))
    for group in groups:
        sizes = [lengths[i] for i in group]
        assert max(sizes) <= max(16, 1.5 * min(sizes))
    # 1 2 3 7 7 16 | 17 | 40 60 | 128 130 (16 and below share a bucket; 60 = 1.5 * 40)
    assert [sorted(lengths[i] for i in group) for group in groups] == [
        [1, 2, 3, 7, 7, 16],
        [17],
        [40, 60],
        [128, 130],
    ]
