"""Reward functions by the name used for `data.reward` in the config."""

from collections.abc import Callable

from rollverify.data.prompts import Prompt
from rollverify.rewards.exact_answer import answer_of, exact_answer

Reward = Callable[[Prompt, str], float]
"""(prompt, decoded response without special tokens) -> score of the response."""

REWARDS: dict[str, Reward] = {"exact_answer": exact_answer}

AnswerOf = Callable[[str], str | None]
"""Decoded response -> its answer as text, None where it gives none; what maj@k counts."""

ANSWERS: dict[str, AnswerOf] = {"exact_answer": answer_of}
"""By the name of the reward; one that has no such text is left out, and maj@k with it."""
