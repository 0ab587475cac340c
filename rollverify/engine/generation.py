"""Runs requests to their end where nothing is paused, and names and seeds those of evaluation."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rollverify.engine.engine import Completion, GenerationRequest, RolloutEngine
from rollverify.errors import RolloutError


@dataclass(kw_only=True, slots=True)
class GenerationStats:
    """What a rollout phase cost."""

    num_tokens: int = 0
    """Tokens generated."""

    num_steps: int = 0
    """Engine steps."""

    num_lost: int = 0
    """Tokens under way at a pause, sampled again later."""

    num_started: int = 0
    """Responses begun for the first time."""

    num_resumed: int = 0
    """Requests for the rest of a response."""

    tokens_resumed: int = 0
    """Prompt and response of these, which the engine reads again."""

    slot_steps: int = 0
    """Requests unfinished, capped at the engine's slots, summed over steps."""

    capacity: int = 0
    """Slots the engine could have filled, summed over steps."""

    num_held_rows: int = 0
    """Rows of expert ids that resumed responses held."""

    num_changed_rows: int = 0
    """Of these, rows that the new policy's forward pass routes to other experts."""

    active: list[int] = field(default_factory=list[int])
    """Requests unfinished, capped at the engine's slots, at each step."""


@dataclass(slots=True)
class _OpenProblem:
    """A problem whose responses are being generated."""

    index: int
    requests: Sequence[GenerationRequest]
    completions: dict[str, Completion] = field(default_factory=dict[str, Completion])


def run_problems(
    engine: RolloutEngine,
    problems: Iterable[tuple[int, Sequence[GenerationRequest]]],
    max_num_seqs: int | None = None,
    has_stopped: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, list[Completion]]]:
    """Index and completions, in the order of its requests, of each problem as it is complete.

    The engine is idle at first. The next problem is taken while it has fewer than `max_num_seqs`
    requests; all are taken at once if that is None. Once `has_stopped` says so the rest is left.

    Raises:
        RolloutError: if two requests share an id, or the engine returns an unknown request, one
            twice, or never returns one.
    """
    waiting = iter(problems)
    owners: dict[str, _OpenProblem] = {}
    while True:
        while max_num_seqs is None or engine.num_unfinished < max_num_seqs:
            problem = next(waiting, None)
            if problem is None:
                break
            owner = _OpenProblem(*problem)
            for request in owner.requests:
                if request.request_id in owners:
                    raise RolloutError(f"two requests are called '{request.request_id}'")
                owners[request.request_id] = owner
                engine.add_request(request)
        if not engine.num_unfinished:
            break
        if has_stopped():
            engine.pause()
            return
        for completion in engine.step():
            name = completion.request_id
            if name not in owners:
                raise RolloutError(f"engine returned unknown request '{name}'")
            owner = owners[name]
            if name in owner.completions:
                raise RolloutError(f"request '{name}' came back twice")
            owner.completions[name] = completion
            if len(owner.completions) == len(owner.requests):
                yield owner.index, [owner.completions[one.request_id] for one in owner.requests]
    lost = sorted(name for name, owner in owners.items() if name not in owner.completions)
    if lost:
        raise RolloutError(f"engine lost requests {lost[:3]}")


def run_requests(
    engine: RolloutEngine, requests: Iterable[GenerationRequest]
) -> dict[str, Completion]:
    """All completions by request id; see `run_problems`."""
    problems = ((index, [request]) for index, request in enumerate(requests))
    return {done.request_id: done for _, [done] in run_problems(engine, problems)}


SEED_BITS = 62


def request_seed(run_seed: int, group_id: int, sample_index: int, request: int) -> int:
    """Seed of one request of one sample: well mixed, in [0, 2**62).

    `group_id` counts groups in drawing order, `request` the requests sent for this sample before,
    retries and dropped attempts included.
    """
    text = f"{run_seed}/{group_id}/{sample_index}/{request}".encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


EVALUATION_SEED_OFFSET = 1 << 40
"""Keeps evaluation seeds apart from those of training groups."""


def request_name(index: int, sample: int) -> str:
    """Request id of a test problem's greedy response, sample 0, or of a sampled one, 1..n."""
    return f"eval/{index}/{sample}"


def sample_of(request_name: str) -> int:
    """Number of a test problem's response, by its request id."""
    return int(request_name.rpartition("/")[2])


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
    """Requests of one test problem, the greedy one first; seeds depend on its index alone."""
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
