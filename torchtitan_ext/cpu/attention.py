"""Causal attention over packed documents where torchtitan's varlen kernel does not serve.

That is on CPUs, which have none, and in float32, which it would cast to bfloat16.

Documents of similar length share one padded `scaled_dot_product_attention` call.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
from torchtitan.protocols.module import Module


def bucket_documents(lengths: list[int], max_padding: float = 1.5) -> list[list[int]]:
    """Indices grouped so that the longest of a group is at most `max_padding` x its shortest."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    groups: list[list[int]] = []
    for i in order:
        if groups and lengths[i] <= max(16, max_padding * lengths[groups[-1][0]]):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


class PackedSDPA(Module):
    """Drop-in for `VarlenAttention` built on `scaled_dot_product_attention`."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """The settings of `VarlenAttention`; only its causal window is supported."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        if tuple(config.window_size) != (-1, 0):
            raise ValueError(f"PackedSDPA is causal only, got window_size {config.window_size}")

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        enable_gqa: bool = False,
        **kwargs: object,
    ) -> Tensor:
        """Causal attention in each document, [B, L, N, H], of keys and values [B, L, Nkv, H]."""
        unsupported = [name for name, value in kwargs.items() if value is not None]
        if unsupported:
            raise ValueError(f"PackedSDPA does not support {unsupported}")
        batch, length, num_heads, _ = q_BLNH.shape
        q, k, v = (t.reshape(batch * length, -1, t.shape[-1]) for t in (q_BLNH, k_BLNH, v_BLNH))
        groups, inverse = _plan_of(attention_masks, batch * length)
        outputs = [
            _attend(q[index], k[index], v[index], scale, enable_gqa).flatten(0, 1)
            for index in groups
        ]
        packed = torch.cat(outputs, dim=0)[inverse]
        return packed.view(batch, length, num_heads, v.shape[-1])


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, enable_gqa: bool) -> Tensor:
    """Causal attention of [D, L, N, H] right-padded documents.

    Right padding needs no mask: a causal query never sees a later key.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa
    )
    return out.transpose(1, 2)


_Plan = tuple[list[Tensor], Tensor]
_last_plan: tuple[Tensor, _Plan] | None = None
"""Bounds and plan of the last row; the layers of a forward pass share it."""


def _plan_of(metadata: VarlenMetadata, num_tokens: int) -> _Plan:
    """[documents, longest] places in the row per group; [T] place of each token among groups."""
    global _last_plan
    if _last_plan is not None and _last_plan[0] is metadata.cu_seq_q:
        return _last_plan[1]
    starts, lengths = metadata.cu_seq_q[:-1].long(), metadata.cu_seq_q.diff().long()
    device = starts.device
    groups, inverse, offset = [], torch.empty(num_tokens, dtype=torch.int64, device=device), 0
    for members in bucket_documents(lengths.tolist()):
        start, size = starts[members, None], lengths[members, None]
        column = torch.arange(int(size.max()), device=device)
        index = start + torch.minimum(column, size - 1)
        is_real = column < size
        inverse[index[is_real]] = offset + is_real.flatten().nonzero().squeeze(1)
        groups.append(index)
        offset += index.numel()
    _last_plan = (metadata.cu_seq_q, (groups, inverse))
    return groups, inverse
