"""Runs a fixed set of requests to their end and counts what the engine did.

Used for evaluation, where nothing is paused.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from rollverify.errors import RolloutError
from rollverify.rollout.engine import Completion, GenerationRequest, RolloutEngine


@dataclass(kw_only=True, slots=True)
class GenerationStats:
    """What a rollout phase or a call of `run_requests` cost."""

    num_tokens: int = 0
    """Tokens generated."""

    num_steps: int = 0
    """Engine steps."""

    num_started: int = 0
    """Responses begun for the first time."""

    num_resumed: int = 0
    """Requests for the rest of a response."""

    slot_steps: int = 0
    """Requests unfinished, capped at the engine's slots, summed over steps."""

    capacity: int = 0
    """Slots the engine could have filled, summed over steps."""

    num_held_rows: int = 0
    """Rows of expert ids that resumed responses held; not filled by evaluation."""

    num_changed_rows: int = 0
    """Of these, rows that the new policy's forward pass routes to other experts."""

    active: list[int] = field(default_factory=list[int])
    """Requests unfinished, capped at the engine's slots, at each step; not filled by evaluation."""


def run_requests(
    engine: RolloutEngine, requests: Iterable[GenerationRequest], max_num_seqs: int
) -> tuple[dict[str, Completion], GenerationStats]:
    """Generate all responses.

    Args:
        engine: idle engine.
        requests: ids must be unique.
        max_num_seqs: the engine's slots, for the busy share.

    Returns:
        (completions by request id, stats).

    Raises:
        RolloutError: if a request never came back or came back twice, an unknown one did, or two
            requests share an id.
    """
    expected = set()
    for request in requests:
        if request.request_id in expected:
            raise RolloutError(f"two requests are called '{request.request_id}'")
        expected.add(request.request_id)
        engine.add_request(request)
    completions: dict[str, Completion] = {}
    stats = GenerationStats(num_started=len(expected))
    slots = min(max_num_seqs, len(expected))
    while running := engine.num_unfinished:
        stats.num_steps += 1
        stats.slot_steps += min(running, slots)
        for completion in engine.step():
            if completion.request_id in completions:
                raise RolloutError(f"request '{completion.request_id}' came back twice")
            completions[completion.request_id] = completion
            stats.num_tokens += len(completion.token_ids)
    stats.capacity = slots * stats.num_steps
    if completions.keys() != expected:
        lost = sorted(expected - completions.keys())
        unknown = sorted(completions.keys() - expected)
        raise RolloutError(f"engine lost requests {lost[:3]} and returned unknown {unknown[:3]}")
    return completions, stats
