"""How much of a GPU the engine takes beside the trainer."""

GIB = 2**30
MARGIN_SHARE = 0.06
"""Of the GPU's memory: fragmentation and what libraries take while the run goes on."""
MARGIN_BYTES = GIB
SHARE_WITHOUT_SLEEP = 0.4


def engine_share(free_bytes: int, total_bytes: int, sleep: bool) -> float:
    """Share of a GPU's memory for the engine, from what the trainer has left at the start.

    With `sleep` trainer and engine take turns, so the engine gets what is free but for a margin;
    without it the trainer's activations need their room at the same time.
    """
    if not sleep:
        return SHARE_WITHOUT_SLEEP
    return max(0.0, (free_bytes - MARGIN_BYTES) / total_bytes - MARGIN_SHARE)
