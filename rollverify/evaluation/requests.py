"""What the engine is asked for a test problem: one greedy response and n sampled ones.

Training and `rollverify.evaluate` ask for the same, so the same weights give the same numbers.
Does not run the requests.
"""

from collections.abc import Sequence

from rollverify.rollout.engine import GenerationRequest
from rollverify.rollout.seeds import request_seed

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
