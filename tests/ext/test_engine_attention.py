"""The engine's attention over pages and its norm against the textbook and torch.

Dimension letters: T tokens, N query heads, K key/value heads, H head size.
"""

import itertools

import pytest
import torch
from torch import Tensor

from torchtitan_ext.cpu.backend import uses_cpu
from torchtitan_ext.cpu.kernels import (
    KernelRMSNorm,
    attends_heads_of,
    can_use_kernels,
    engine_kernels,
)
from torchtitan_ext.cpu.scoring_attention import PAGE_TOKENS, paged_documents

pytestmark = pytest.mark.skipif(not uses_cpu(), reason="the kernels are of vLLM's CPU build")

HEAD_DIM = 32
# Scores and outputs of size 1 in float32: products of at most 130 terms, error near 1e-6.
TOLERANCE = {"atol": 5e-6, "rtol": 1e-5}


def tensors(lengths: list[int], heads: int, kv_heads: int, seed: int = 0) -> list[Tensor]:
    """q [T, N, H], k and v [T, K, H]."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(sum(lengths), n, HEAD_DIM, generator=generator)
        for n in (heads, kv_heads, kv_heads)
    ]


def bounds_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)])


def per_document(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float) -> Tensor:
    """[T, N, H] in float64."""
    k, v = (t.double().repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    outputs = []
    for q_D, k_D, v_D in zip(*(t.split(lengths) for t in (q.double(), k, v)), strict=True):
        scores = torch.einsum("qnh,knh->nqk", q_D, k_D) * scale
        future = torch.ones(len(q_D), len(q_D), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("nqk,knh->qnh", weights, v_D))
    return torch.cat(outputs)


EDGES = [PAGE_TOKENS - 1, PAGE_TOKENS, PAGE_TOKENS + 1, 2 * PAGE_TOKENS]


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("lengths", [[1], [5, 1, 130, 1], EDGES, [64] * 3], ids=str)
def test_equals_full_attention_of_each_document(lengths, heads, kv_heads):
    q, k, v = tensors(lengths, heads, kv_heads)
    pages = paged_documents(bounds_of(lengths), heads, kv_heads, HEAD_DIM)
    got = pages.attend(q, k, v, 0.2)
    torch.testing.assert_close(got, per_document(q, k, v, lengths, 0.2).float(), **TOLERANCE)


def test_layers_share_the_pages_and_see_their_own_keys_only():
    lengths, bounds = [40, 9], bounds_of([40, 9])
    for layer in range(2):
        q, k, v = tensors(lengths, 2, 1, seed=layer)
        pages = paged_documents(bounds, 2, 1, HEAD_DIM)
        assert pages is paged_documents(bounds, 2, 1, HEAD_DIM)
        want = per_document(q, k, v, lengths, 0.2).float()
        torch.testing.assert_close(pages.attend(q, k, v, 0.2), want, **TOLERANCE)


def test_equal_bounds_of_another_row_get_pages_of_their_own():
    first, second = (paged_documents(bounds_of([3, 4]), 2, 1, HEAD_DIM) for _ in range(2))
    assert first is not second


def test_the_installed_engine_has_the_kernels():
    """Without them scoring would still be right, and slow."""
    assert engine_kernels() is not None
    assert attends_heads_of(64) and not attends_heads_of(8)


def test_kernels_are_for_plain_float32_without_gradient():
    value = torch.zeros(2)
    assert not can_use_kernels(value)
    with torch.no_grad():
        assert can_use_kernels(value)
        assert not can_use_kernels(value, value.bfloat16())


def test_norms_equal_torchs_own_whatever_the_strides():
    norm = KernelRMSNorm.Config(normalized_shape=48, eps=1e-6).build()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(48, 5, 7, generator=torch.Generator().manual_seed(0)).permute(2, 1, 0)
    want = norm(x).detach()
    with torch.no_grad():
        torch.testing.assert_close(norm(x), want, atol=2e-6, rtol=0.0)  # values of size 5
