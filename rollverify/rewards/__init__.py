"""Rewards by the name used for `data.reward`: exact_answer, math, or a user's own function."""

import logging
from collections.abc import Sequence

from rollverify.config.function import NAME_OF_A_FUNCTION
from rollverify.data.prompts import Prompt
from rollverify.errors import ConfigError, DataError
from rollverify.rewards.exact import ExactAnswer, exact_answer
from rollverify.rewards.function import FunctionReward
from rollverify.rewards.maths import MathReward
from rollverify.rewards.reward import Reward

__all__ = ["Reward", "exact_answer", "make_reward", "readable_indices", "reward_class"]

logger = logging.getLogger(__name__)

BUILT_IN: dict[str, type[Reward]] = {"exact_answer": ExactAnswer, "math": MathReward}


def reward_class(name: str) -> type[Reward]:
    """The class of a reward."""
    if name not in BUILT_IN and not NAME_OF_A_FUNCTION.fullmatch(name):
        raise ConfigError(
            f"data.reward must be one of {', '.join(BUILT_IN)}, module:function or "
            f"path/to/file.py:function, got {name!r}"
        )
    return BUILT_IN.get(name, FunctionReward)


def make_reward(name: str, *, time_out_s: float, num_workers: int) -> Reward:
    """The reward of a name; one object serves a whole run. Limit and processes are its workers'."""
    kind = reward_class(name)
    if issubclass(kind, FunctionReward):
        return kind(name, time_out_s=time_out_s, num_workers=num_workers)
    if issubclass(kind, MathReward):
        return kind(time_out_s=time_out_s, num_workers=num_workers)
    return kind()


def readable_indices(prompts: Sequence[Prompt], reward: Reward, source: str) -> list[int]:
    """Indices of the prompts whose answer a response can be compared with; none is a DataError."""
    bad = reward.unreadable(prompts)
    names = ", ".join(repr(prompts[index].prompt_id) for index in bad[:5])
    if bad and len(bad) == len(prompts):
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
    return sorted(set(range(len(prompts))) - set(bad))
