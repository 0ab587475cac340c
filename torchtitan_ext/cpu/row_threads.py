"""Scores several packed rows of a dense model on a CPU at a time, each in a thread of its own.

Threads inside of operations wait for one another at the end of each of them, hundreds of times in a
pass, and share what lies in their caches; a thread that has a row to itself does neither. Rows give
the same numbers in whatever order and thread. Only for one rank that holds all weights, and only
forwards of `ScoringBlock`, which keep no state.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from torchtitan_ext.cpu.scoring_block import ScoringBlock
from torchtitan_ext.models.decoder import ScoringDecoder
from torchtitan_ext.packed_rows import RowInputs

MAX_ROWS_AT_ONCE = 4
"""With more cores, each row's operations share some: Python runs for one row at a time."""


class RowThreads:
    """Runs the rows of a pass side by side."""

    def __init__(self, model: torch.nn.Module, *, dtype: str) -> None:
        """Look at a model.

        Args:
            model: sharded by FSDP2 already.
            dtype: name of the type its forward computes in.
        """
        self._model = model
        self._is_suited = (
            isinstance(model, ScoringDecoder)
            and dtype == "float32"
            and dist.get_world_size() == 1
            and all(
                isinstance(block, ScoringBlock) and block.is_thread_safe
                for block in model.layers.values()
            )
        )
        self._pool = ThreadPoolExecutor(MAX_ROWS_AT_ONCE - 1, "score")  # starts none yet

    @property
    def rows_at_once(self) -> int:
        """Rows that `score` works on at the same time; 1 where it cannot be used."""
        return min(MAX_ROWS_AT_ONCE, torch.get_num_threads()) if self._is_suited else 1

    def score(self, rows: Sequence[RowInputs], *, temperature: float) -> list[Tensor]:
        """Log-probs of the rows' targets.

        Args:
            rows: in any order; the longest are begun first.
            temperature: > 0.

        Returns:
            One [T] float32 tensor of nats per row.

        Raises:
            RuntimeError: if the model is not suited (`rows_at_once` is 1), or from an operation.
        """
        if not self._is_suited:
            raise RuntimeError("this model's rows cannot be scored side by side")
        order = sorted(range(len(rows)), key=lambda i: -rows[i].tokens.numel())
        queue, lock = iter(order), threading.Lock()
        scores: dict[int, Tensor] = {}

        def work() -> None:
            while True:
                with lock:
                    index = next(queue, None)
                if index is None:
                    return
                scores[index] = self._score_row(rows[index], temperature)

        num_rows = self.rows_at_once
        with _threads_per_operation(torch.get_num_threads() // num_rows) as num_threads:

            def help_with_work() -> None:
                torch._C.set_num_threads(num_threads)  # a setting of each thread
                work()

            with self._gathered_weights():
                helpers = [self._pool.submit(help_with_work) for _ in range(num_rows - 1)]
                try:
                    work()
                finally:
                    for helper in helpers:
                        helper.result()
        return [scores[index] for index in range(len(rows))]

    @torch.no_grad()
    def _score_row(self, row: RowInputs, temperature: float) -> Tensor:
        assert isinstance(self._model, ScoringDecoder)
        return self._model.score_gathered(
            row.tokens, targets=row.targets, temperature=temperature, **row.context
        )

    @contextmanager
    def _gathered_weights(self) -> Iterator[None]:
        """FSDP's hooks, which would do this for each row, are not made for several threads."""
        shards = [module for module in self._model.modules() if isinstance(module, FSDPModule)]
        for module in shards:
            module.unshard()
        try:
            yield
        finally:
            for module in shards:
                module.reshard()


@contextmanager
def _threads_per_operation(num_threads: int) -> Iterator[int]:
    """Yields the number. vLLM replaces `torch.set_num_threads` by a no-op."""
    before = torch.get_num_threads()
    torch._C.set_num_threads(num_threads)
    try:
        yield num_threads
    finally:
        torch._C.set_num_threads(before)
