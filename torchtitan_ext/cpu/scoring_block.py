"""A transformer block with a second, faster forward for passes without gradient on a CPU.

There norms, rotary embedding and attention are the engine's kernels, and the feed-forward part runs
over so few tokens that they stay in the cache. Dimensions: T tokens, D model width, N query heads,
K key/value heads, H head size.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.common.attention import GQAttention, VarlenMetadata
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.qwen3.model import Qwen3TransformerBlock

from torchtitan_ext.cpu.kernels import attends_heads_of, can_use_kernels, engine_kernels
from torchtitan_ext.cpu.scoring_attention import paged_documents

PART_VALUES = 2**18
"""Float32 values of the widest tensor of one part: 1 MiB. On two cores with 1 MiB of cache each,
half of this was as fast and a quarter or four times of it slower."""

MIN_PART_TOKENS = 128
"""Below this, wide layers would spend their time starting operations."""


class ScoringBlock(Qwen3TransformerBlock):
    """Qwen3's block, which without experts is Llama's as well."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        """The settings of `Qwen3TransformerBlock`."""

    attention: GQAttention

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor, attention_masks: VarlenMetadata, positions: Tensor | None = None
    ) -> Tensor:
        """One packed row, [1, T, D]; ValueError for a document beyond the rotary table."""
        attention = self.attention
        if (
            positions is None
            or not can_use_kernels(x, self.attention_norm.weight, attention.wo.weight)
            or not attends_heads_of(attention.head_dim)
        ):
            return super().forward(x, attention_masks, positions)
        pages = paged_documents(
            attention_masks.cu_seq_q, attention.n_heads, attention.n_kv_heads, attention.head_dim
        )
        if pages.longest > len(attention.rope.cache):
            num_positions = len(attention.rope.cache)
            raise ValueError(
                f"a document of {pages.longest} tokens: the model has {num_positions} positions"
            )
        q, k, v = self._projected(x, positions)
        scale = attention.head_dim**-0.5 if attention.scaling is None else attention.scaling
        heads = pages.attend(q, k, v, scale).flatten(1)
        hidden = torch.addmm(x[0], heads, attention.wo.weight.T)
        normed = self.ffn_norm(hidden)
        if self.moe_enabled:
            hidden += self.moe(normed[None])[0]
        else:
            _add_in_parts(hidden, normed, self.feed_forward)
        return hidden[None]

    @property
    def is_thread_safe(self) -> bool:
        """Whether the forward without gradient keeps nothing from layer to layer."""
        return attends_heads_of(self.attention.head_dim) and not self.moe_enabled

    def _projected(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, N, H] and keys [T, K, H], rotated, and values [T, K, H]."""
        attention = self.attention
        q, k, v = (t[0].contiguous() for t in attention.qkv_linear(self.attention_norm(x)))
        if attention.q_norm is not None and attention.k_norm is not None:
            q, k = attention.q_norm(q), attention.k_norm(k)
        table = _rotary_table(attention.rope.cache)
        engine_kernels().rotary_embedding(
            positions[0], q.flatten(1), k.flatten(1), attention.head_dim, table, True
        )
        return q, k, v


def _add_in_parts(hidden_TD: Tensor, normed_TD: Tensor, feed_forward: FeedForward) -> None:
    """Add w2(silu(w1 normed) * w3 normed) to `hidden_TD`, in place."""
    size = max(MIN_PART_TOKENS, PART_VALUES // feed_forward.w1.weight.shape[0])
    for hidden, normed in zip(hidden_TD.split(size), normed_TD.split(size), strict=True):
        gate = F.silu(feed_forward.w1(normed), inplace=True).mul_(feed_forward.w3(normed))
        hidden.addmm_(gate, feed_forward.w2.weight.T)


def _rotary_table(cache: Tensor) -> Tensor:
    """[positions, H] cosines and sines, from a cache that holds them twice, once for each half."""
    half = cache.shape[1] // 4
    return torch.cat([cache[:, :half], cache[:, 2 * half : 3 * half]], dim=-1)
