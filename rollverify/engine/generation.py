"""Runs a fixed set of requests to their end and counts what the engine did.

Used for evaluation, where nothing is paused.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rollverify.engine.engine import Completion, GenerationRequest, RolloutEngine
from rollverify.errors import RolloutError


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


SEED_BITS = 62


def request_seed(run_seed: int, group_id: int, sample_index: int, request: int) -> int:
    """Seed of one request of one sample.

    Args:
        run_seed: seed of the run.
        group_id: number of the group in drawing order.
        sample_index: place in the group.
        request: requests sent for this sample before, retries and dropped attempts included.

    Returns:
        Integer in [0, 2**62), well mixed: neighbours get unrelated streams.

    Source:
        Our choice: the first 8 bytes of BLAKE2b over the four numbers.
    """
    text = f"{run_seed}/{group_id}/{sample_index}/{request}".encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


@dataclass(slots=True)
class _OpenProblem:
    """A problem whose responses are being generated."""

    index: int
    names: list[str]
    completions: dict[str, Completion] = field(default_factory=dict[str, Completion])


def run_problems(
    engine: RolloutEngine,
    problems: Iterable[tuple[int, Sequence[GenerationRequest]]],
    max_num_seqs: int,
    finish: Callable[[int, list[Completion]], None],
) -> None:
    """Generate all responses of all problems.

    Args:
        engine: idle engine.
        problems: index and requests of each problem; request ids are unique. The next problem is
            taken as soon as a slot is free.
        max_num_seqs: the engine's slots.
        finish: called with a problem's index and completions, in the order of its requests, when
            the last one is done.

    Raises:
        RolloutError: if the engine returns an unknown request, or never returns one.
    """
    waiting = iter(problems)
    has_more = True
    owners: dict[str, _OpenProblem] = {}
    while True:
        while has_more and engine.num_unfinished < max_num_seqs:
            problem = next(waiting, None)
            if problem is None:
                has_more = False
                break
            index, requests = problem
            names = [one.request_id for one in requests]
            owners |= dict.fromkeys(names, _OpenProblem(index, names))
            for request in requests:
                engine.add_request(request)
        if not engine.num_unfinished:
            break
        for completion in engine.step():
            owner = owners.pop(completion.request_id, None)
            if owner is None:
                raise RolloutError(f"engine returned unknown request '{completion.request_id}'")
            owner.completions[completion.request_id] = completion
            if len(owner.completions) == len(owner.names):
                finish(owner.index, [owner.completions[name] for name in owner.names])
    if owners:
        raise RolloutError(f"engine lost requests {sorted(owners)[:3]}")


EVALUATION_SEED_OFFSET = 1 << 40
"""Keeps evaluation seeds apart from those of training groups."""


def request_name(index: int, sample: int) -> str:
    """Request id of a response.

    Args:
        index: the problem's place in the test set.
        sample: 0 for the greedy response, 1..n for the sampled ones.
    """
    return f"eval/{index}/{sample}"


def problem_requests(
    index: int,
    prompt_ids: Sequence[int],
    *,
    num_samples: int,
    temperature: float,
    top_p: float,
    max_response_tokens: int,
    run_seed: int,
) -> list[GenerationRequest]:
    """Requests of one problem, the greedy one first.

    Args:
        index: the problem's place in the test set; seeds depend on it, not on the order of work.
        prompt_ids: token ids of the prompt.
        num_samples: n, >= 1.
        temperature: of the sampled responses, > 0.
        top_p: probability mass that they are drawn from, in (0, 1].
        max_response_tokens: limit of one response.
        run_seed: seed of the run.

    Returns:
        1 + num_samples requests; number s is called `request_name(index, s)`.
    """
    return [
        GenerationRequest(
            request_id=request_name(index, sample),
            token_ids=tuple(prompt_ids),
            max_tokens=max_response_tokens,
            seed=request_seed(run_seed, EVALUATION_SEED_OFFSET + index, sample, 0),
            temperature=0.0 if sample == 0 else temperature,
            top_p=1.0 if sample == 0 else top_p,
        )
        for sample in range(num_samples + 1)
    ]
