"""Causal attention over packed documents by vLLM's CPU kernel, forward only.

The kernel reads keys and values from pages, as the engine keeps them, so documents of any lengths
need no padding.

Dimension letters: T tokens, N query heads, K key/value heads, H head size, P pages, S tokens of one
page.
"""

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_ext.cpu.kernels import engine_kernels, instruction_set

PAGE_TOKENS = 32
"""Smallest page that the kernel takes; the last page of a document is partly empty."""

_one_call = threading.Lock()
"""The kernel and its planning work in memory that all threads of the process share."""

_of_thread = threading.local()
"""What the last call of this thread laid out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedDocuments:
    """Where the tokens of one packed row lie in pages; the layers of a forward pass share it."""

    keys: Tensor
    """[P, K, S, H]; empty places stay 0, since 0 times a left-over infinity would be NaN."""

    values: Tensor
    """[P, K, S, H]; the same."""

    bounds: Tensor
    """[documents + 1] int32; first token of each document, and T."""

    lengths: Tensor
    """[documents] int32 tokens."""

    longest: int
    """Tokens of the longest document."""

    table: Tensor
    """[documents, most pages of one] int32; the pages of each document."""

    slots: Tensor
    """[T] int64; place of each token in the pages."""

    instructions: str
    """Instruction set, as vLLM names it."""

    plan: Tensor
    """vLLM's division of the work among threads."""

    def attend(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, scale: float) -> Tensor:
        """Attend causally within each document; all float32, queries contiguous.

        Args:
            q_TNH: [T, N, H] queries.
            k_TKH: [T, K, H] keys.
            v_TKH: [T, K, H] values.
            scale: multiplier of the scores.

        Returns:
            [T, N, H].
        """
        kernels = engine_kernels()
        kernels.cpu_attn_reshape_and_cache(
            k_TKH, v_TKH, self.keys, self.values, self.slots, self.instructions
        )
        out_TNH = torch.empty_like(q_TNH)
        with _one_call:
            kernels.cpu_attention_with_kv_cache(
                query=q_TNH,
                key_cache=self.keys,
                value_cache=self.values,
                output=out_TNH,
                query_start_loc=self.bounds,
                seq_lens=self.lengths,
                scale=scale,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=self.table,
                softcap=0.0,
                scheduler_metadata=self.plan,
                s_aux=None,
            )
        return out_TNH


def paged_documents(
    bounds: Tensor, num_heads: int, num_kv_heads: int, head_size: int
) -> PagedDocuments:
    """Lay the documents of a packed row out in pages.

    Args:
        bounds: [documents + 1] integers; first token of each document, and T.
        num_heads: N.
        num_kv_heads: K.
        head_size: H; `attends_heads_of` must be true of it.

    Returns:
        For the same `bounds` (not only equal ones) as in this thread's last call the same object
        again, whose keys and values the next layer overwrites.
    """
    sizes = (num_heads, num_kv_heads, head_size)
    last = getattr(_of_thread, "last", None)
    if last is None or last[0] is not bounds or last[1] != sizes:
        last = _of_thread.last = (bounds, sizes, _lay_out(bounds.int(), *sizes))
    return last[2]


def _lay_out(bounds: Tensor, num_heads: int, num_kv_heads: int, head_size: int) -> PagedDocuments:
    lengths = bounds.diff()
    num_pages = (lengths + PAGE_TOKENS - 1) // PAGE_TOKENS
    first_page = num_pages.cumsum(0) - num_pages
    positions = torch.arange(int(bounds[-1])) - bounds[:-1].repeat_interleave(lengths)
    pages = torch.zeros(int(num_pages.sum()), num_kv_heads, 2 * PAGE_TOKENS, head_size)
    keys, values = pages.chunk(2, dim=2)
    instructions = instruction_set(PAGE_TOKENS, head_size)
    with _one_call:
        plan = engine_kernels().cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_size,
            seq_lens=lengths,
            dtype=torch.float32,
            query_start_loc=bounds,
            causal=True,
            sliding_window_size=-1,
            isa=instructions,
            enable_kv_split=False,
        )
    return PagedDocuments(
        keys=keys,
        values=values,
        bounds=bounds,
        lengths=lengths,
        longest=int(lengths.max()),
        table=(first_page[:, None] + torch.arange(int(num_pages.max()))).int(),
        slots=first_page.repeat_interleave(lengths) * PAGE_TOKENS + positions,
        instructions=instructions,
        plan=plan,
    )
