"""Reward functions by the name used for `data.reward` in the config."""

from collections.abc import Callable

from rollverify.data.prompts import Prompt
from rollverify.rewards.exact_answer import exact_answer

Reward = Callable[[Prompt, str], float]
"""(prompt, decoded response without special tokens) -> score of the response."""

REWARDS: dict[str, Reward] = {"exact_answer": exact_answer}
