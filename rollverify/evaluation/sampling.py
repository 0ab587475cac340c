"""Generates the responses of test problems, problem by problem, and hands each over when complete.

The engine is kept full, and what is complete can be written before the rest is done. Does not
grade and writes no file.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rollverify.errors import RolloutError
from rollverify.rollout.engine import Completion, GenerationRequest, RolloutEngine


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
