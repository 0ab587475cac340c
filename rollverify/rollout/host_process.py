"""What a rollout engine that shares its process with a trainer must leave as it found it.

Rank variables of torchrun and the number of CPU threads. Imports no engine library.
"""

import contextlib
import os
from collections.abc import Iterator

import torch

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_RANK_VARIABLES += ("MASTER_ADDR", "MASTER_PORT")

_OVERHEAD_PARAMETERS = 400_000
"""Work of a token that does not grow with the model, such as sampling it, in parameters."""

_SMALL_STEP = 120_000_000
"""Tokens times parameters below which one thread is faster."""

# vLLM's CPU worker replaces torch's function by one that does nothing but write a warning.
_set_num_threads = torch.set_num_threads


@contextlib.contextmanager
def hidden_rank_variables() -> Iterator[None]:
    """Keep torchrun's variables from an engine that would take them for its own layout."""
    saved = {name: os.environ.pop(name) for name in _RANK_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(saved)


@contextlib.contextmanager
def cpu_threads(num_threads: int) -> Iterator[None]:
    """Run with another number of CPU threads; 0 leaves it alone."""
    before = torch.get_num_threads()
    if num_threads in (0, before):
        yield
        return
    _set_num_threads(num_threads)
    try:
        yield
    finally:
        _set_num_threads(before)


def step_threads(requested: int, num_parameters: int, num_tokens: int) -> int:
    """CPU threads for one step of an engine, 0 for torch's own number.

    Args:
        requested: what the user set; 0 lets the size of the step decide.
        num_parameters: of the model.
        num_tokens: that the step computes, of prompts and of running responses.

    Returns:
        1 for a step so small that waking threads costs more than they save. On two cores two
        threads were 0.8 x as fast as one at 16 and 32 sequences of models of 0.1M, 0.8M and 1.2M
        parameters, and equally fast at 240, 100 and 200.
    """
    if requested:
        return requested
    return 1 if num_tokens * (num_parameters + _OVERHEAD_PARAMETERS) < _SMALL_STEP else 0


class StepThreads:
    """Chooses the CPU threads of an engine's steps."""

    def __init__(self, requested: int, num_parameters: int, *, on_cpu: bool) -> None:
        """Set up.

        Args:
            requested: see `step_threads`.
            num_parameters: of the model.
            on_cpu: False leaves torch's number of threads alone.
        """
        self._requested = requested
        self._num_parameters = num_parameters
        self._on_cpu = on_cpu
        self._num_new = 0

    def add(self, num_tokens: int) -> None:
        """Count the tokens of a prompt that the next step will compute."""
        self._num_new += num_tokens

    def of_step(self, num_running: int) -> contextlib.AbstractContextManager[None]:
        """Threads for the next step, which decodes a token for each of so many requests."""
        num_tokens, self._num_new = self._num_new + num_running, 0
        if not self._on_cpu:
            return contextlib.nullcontext()
        return cpu_threads(step_threads(self._requested, self._num_parameters, num_tokens))
