"""Scores packed rows on a CPU side by side, each in a thread of its own.

Threads inside of operations wait for one another at the end of each. For one rank, and blocks that
keep no state.
"""

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torchtitan.models.common.decoder import Decoder

from torchtitan_ext.cpu.scoring_block import ScoringBlock

MAX_ROWS_AT_ONCE = 4
"""With more cores, each row's operations share some: Python runs for one row at a time."""


class RowThreads:
    """Runs the rows of a pass side by side."""

    def __init__(self, model: Decoder, *, dtype: str) -> None:
        """Of a model sharded by FSDP2 already that computes in `dtype`."""
        self._model = model
        self._is_suited = (
            dtype == "float32"
            and dist.get_world_size() == 1
            and all(
                isinstance(block, ScoringBlock) and block.is_thread_safe
                for block in model.layers.values()
            )
        )

    @property
    def rows_at_once(self) -> int:
        """Rows that `score` works on at the same time; 1 where it cannot be used."""
        return min(MAX_ROWS_AT_ONCE, torch.get_num_threads()) if self._is_suited else 1

    def score(self, rows: Sequence[dict[str, Any]], *, temperature: float) -> list[Tensor]:
        """[T] float32 nats per row; `rows` are keywords of `ScoringDecoder.forward`."""
        num_threads, num_rows = torch.get_num_threads(), self.rows_at_once
        longest_first = sorted(range(len(rows)), key=lambda i: -rows[i]["tokens"].numel())

        def score_row(index: int) -> Tensor:
            # Of each thread, and the default of new ones; vLLM makes torch's public name a no-op.
            torch._C.set_num_threads(num_threads // num_rows)
            return _score_row(self._model, rows[index], temperature)

        try:
            with _gathered_weights(self._model):
                pool = _pool(num_rows)
                futures = {index: pool.submit(score_row, index) for index in longest_first}
                wait(futures.values())
        finally:
            torch._C.set_num_threads(num_threads)
        scores = {index: future.result() for index, future in futures.items()}
        return [scores[index] for index in range(len(rows))]


@functools.cache
def _pool(num_rows: int) -> ThreadPoolExecutor:
    """Kept, because the memory of new threads is slower."""
    return ThreadPoolExecutor(num_rows, "score")


@torch.no_grad()
def _score_row(model: Decoder, row: dict[str, Any], temperature: float) -> Tensor:
    """`ScoringDecoder.forward` past the hooks of FSDP, for weights that are gathered already."""
    hidden = model.tok_embeddings.forward(row["tokens"])
    for block in model.layers.values():
        hidden = block.forward(hidden, row["attention_masks"], row["positions"])
    normed = model.norm.forward(hidden)
    return model.lm_head.forward(normed, row["targets"], temperature, with_entropy=False)[0]


@contextmanager
def _gathered_weights(model: torch.nn.Module) -> Iterator[None]:
    """FSDP's hooks, which would do this for each row, are not made for several threads."""
    shards = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in shards:
        module.unshard()
    try:
        yield
    finally:
        for module in shards:
            module.reshard()
