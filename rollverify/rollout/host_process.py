"""What a rollout engine that shares its process with a trainer must leave as it found it.

Rank variables of torchrun and the number of CPU threads. Imports no engine library.
"""

import contextlib
import os
from collections.abc import Iterator

import torch

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_RANK_VARIABLES += ("MASTER_ADDR", "MASTER_PORT")

SMALL_MODEL_PARAMETERS = 1_000_000


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
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def decode_threads(requested: int, num_parameters: int) -> int:
    """CPU threads for decoding, 0 for torch's own number.

    Args:
        requested: what the user set; 0 lets the size of the model decide.
        num_parameters: of the model.

    Returns:
        1 for a model so small that waking threads costs more than they save: at 0.8M parameters a
        decode step of 64 sequences took 5.5 ms with one thread and 6-13 ms with two.
    """
    if requested:
        return requested
    return 1 if num_parameters < SMALL_MODEL_PARAMETERS else 0
