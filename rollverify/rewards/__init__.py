"""Reward functions by the name used for `data.reward` in the config."""

import logging
from collections.abc import Callable, Sequence

from rollverify.data.prompts import Prompt
from rollverify.errors import DataError
from rollverify.rewards.exact_answer import answer_of, exact_answer
from rollverify.rewards.math_answer import written_answer
from rollverify.rewards.math_reward import MathReward

logger = logging.getLogger(__name__)

Reward = Callable[[Prompt, str], float]
"""(prompt, decoded response without special tokens) -> score of the response.

It may be an object that also has `score_all`, `take_counts` and `close`, as `MathReward` has.
"""


REWARDS: dict[str, Reward] = {"exact_answer": exact_answer}
"""Those that need no settings and no process of their own."""

AnswerOf = Callable[[str], str | None]
"""Decoded response -> its answer as text, None where it gives none; what maj@k counts."""

ANSWERS: dict[str, AnswerOf] = {"exact_answer": answer_of, "math": written_answer}
"""By the name of the reward; one that has no such text is left out, and maj@k with it."""


_WAIT_FOR_PROCESSES = frozenset({"math"})


def num_graders(name: str, num_workers: int) -> int:
    """Threads that shall grade beside the engine; 0 where a thread costs more than the grading.

    Args:
        name: of the reward.
        num_workers: processes of a reward that has any; each serves one thread at a time.
    """
    return num_workers if name in _WAIT_FOR_PROCESSES else 0


def make_reward(name: str, *, time_out_s: float, num_workers: int) -> Reward:
    """The reward of a name; one object serves a whole run.

    Args:
        name: "exact_answer" or "math".
        time_out_s: limit of one comparison, for rewards that use worker processes.
        num_workers: processes, for those rewards.

    Raises:
        ConfigError: if the reward needs a package that is not installed.
    """
    if name == "math":
        return MathReward(time_out_s=time_out_s, num_workers=num_workers)
    return REWARDS[name]


def readable_indices(prompts: Sequence[Prompt], reward: Reward, source: str) -> list[int]:
    """Indices of the prompts whose answer a response can be compared with; the rest is counted.

    Args:
        prompts: of one source, in its order.
        reward: scores a decoded response.
        source: where they come from, for messages only.

    Raises:
        DataError: if no answer can be read.
    """
    if not isinstance(reward, MathReward):
        return list(range(len(prompts)))
    bad = set(reward.unreadable(prompts))
    names = ", ".join(repr(prompts[index].prompt_id) for index in sorted(bad)[:5])
    if len(bad) == len(prompts):
        raise DataError(
            f"{source}: no 'answer' can be read as mathematics (ids {names}); give LaTeX or "
            "numbers, or set data.reward = 'exact_answer'"
        )
    if bad:
        logger.warning(
            "%s: gold unreadable in %d of %d prompts, which are left out (ids %s)",
            source,
            len(bad),
            len(prompts),
            names,
        )
    return [index for index in range(len(prompts)) if index not in bad]


def counts_of(reward: Reward) -> Callable[[], dict[str, int]] | None:
    """What counts gradings without a verdict since it was last called; None if nothing is."""
    return reward.take_counts if isinstance(reward, MathReward) else None


def close_reward(reward: Reward) -> None:
    """End the processes of a reward that has any."""
    if isinstance(reward, MathReward):
        reward.close()
