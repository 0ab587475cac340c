"""Causal attention over packed documents by vLLM's CPU kernel, forward only.

Keys and values lie in pages, so documents need no padding. Dimensions: T tokens, N query heads, K
key/value heads, H head size, P pages, S tokens of one page.
"""

import threading

import torch
from torch import Tensor

from torchtitan_ext.cpu.kernels import engine_kernels, instruction_set

PAGE_TOKENS = 32
"""Smallest page that the kernel takes; the last page of a document is partly empty."""

_one_call = threading.Lock()
"""The kernel and its planning work in memory that all threads of the process share."""

_of_thread = threading.local()
"""What the last call of this thread laid out."""


class PagedDocuments:
    """Where the tokens of one packed row lie in pages; the layers of a forward pass share it."""

    def __init__(self, bounds: Tensor, num_heads: int, num_kv_heads: int, head_size: int) -> None:
        """See `paged_documents`; bounds are int32."""
        self._bounds, self._lengths = bounds, bounds.diff()
        self.longest = int(self._lengths.max())
        """Tokens of the longest document."""

        num_pages = (self._lengths + PAGE_TOKENS - 1) // PAGE_TOKENS
        first_page = num_pages.cumsum(0) - num_pages
        # The pages of each document, and the place of each token in the pages.
        self._table = (first_page[:, None] + torch.arange(int(num_pages.max()))).int()
        positions = torch.arange(int(bounds[-1])) - bounds[:-1].repeat_interleave(self._lengths)
        self._slots = first_page.repeat_interleave(self._lengths) * PAGE_TOKENS + positions
        # Empty places stay 0: 0 times a left-over infinity would be NaN.
        pages = torch.zeros(int(num_pages.sum()), num_kv_heads, 2 * PAGE_TOKENS, head_size)
        self._keys_PKSH, self._values_PKSH = pages.chunk(2, dim=2)
        self._instructions = instruction_set(PAGE_TOKENS, head_size)
        with _one_call:
            # vLLM's division of the work among threads.
            self._plan = engine_kernels().cpu_attn_get_scheduler_metadata(
                num_reqs=len(self._lengths),
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_size,
                seq_lens=self._lengths,
                dtype=torch.float32,
                query_start_loc=bounds,
                causal=True,
                sliding_window_size=-1,
                isa=self._instructions,
                enable_kv_split=False,
            )

    def attend(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, scale: float) -> Tensor:
        """Causal attention within each document, [T, N, H]; float32, queries contiguous."""
        kernels = engine_kernels()
        kernels.cpu_attn_reshape_and_cache(
            k_TKH, v_TKH, self._keys_PKSH, self._values_PKSH, self._slots, self._instructions
        )
        out_TNH = torch.empty_like(q_TNH)
        with _one_call:
            kernels.cpu_attention_with_kv_cache(
                query=q_TNH,
                key_cache=self._keys_PKSH,
                value_cache=self._values_PKSH,
                output=out_TNH,
                query_start_loc=self._bounds,
                seq_lens=self._lengths,
                scale=scale,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=self._table,
                softcap=0.0,
                scheduler_metadata=self._plan,
                s_aux=None,
            )
        return out_TNH


def paged_documents(
    bounds: Tensor, num_heads: int, num_kv_heads: int, head_size: int
) -> PagedDocuments:
    """The documents of a packed row in pages; `bounds`, [documents + 1], end with T.

    For the same tensor as in this thread's last call it is the same object, whose keys and values
    the next layer overwrites.
    """
    sizes = (num_heads, num_kv_heads, head_size)
    last = getattr(_of_thread, "last", None)
    if last is None or last[0] is not bounds or last[1] != sizes:
        last = _of_thread.last = (bounds, sizes, PagedDocuments(bounds.int(), *sizes))
    return last[2]
