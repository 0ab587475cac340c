"""What every reward is, and what those that grade in worker processes share."""

import logging
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rollverify.data.prompts import Prompt
from rollverify.rewards.pool import WorkerPool

logger = logging.getLogger(__name__)

COUNTED = ("error", "timeout", "gold_unreadable")
"""Verdicts that are no statement on the response; each gives reward 0 and is counted."""

_MAX_WARNINGS = 20


class Reward:
    """Scores responses; one object serves a whole run."""

    num_threads = 0
    """Threads that shall grade beside the engine; 0 where a thread costs more than the grading."""

    has_answers = False
    """Whether `answer_of` reads answers, so that maj@k can count them."""

    def __call__(self, prompt: Prompt, response_text: str) -> float:
        """Score of a decoded response without special tokens; safe in `num_threads` threads."""
        raise NotImplementedError

    def score_all(self, pairs: Sequence[tuple[Prompt, str]]) -> list[float]:
        """Scores of many responses, in their order."""
        with ThreadPoolExecutor(self.num_threads or 1) as threads:
            return list(threads.map(lambda pair: self(*pair), pairs))

    def answer_of(self, response_text: str) -> str | None:
        """The answer of a response as text; None where it gives none."""
        return None

    def check(self, prompt: Prompt) -> None:
        """Raise a DataError if the prompt's answer is one that must be corrected."""

    def unreadable(self, prompts: Sequence[Prompt]) -> list[int]:
        """Indices of prompts whose answer nothing could be compared with, in order."""
        return []

    def take_counts(self) -> dict[str, int]:
        """Responses per verdict of `COUNTED` since the last call; {} if there can be none."""
        return {}

    def close(self) -> None:
        """End the processes of the reward."""


class WorkerReward(Reward):
    """A reward that waits for worker processes."""

    def __init__(self, pool: WorkerPool) -> None:
        self.num_threads = pool.num_workers
        self._pool = pool
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._num_warned = 0

    def _count(self, verdict: str) -> None:
        with self._lock:
            self._counts[verdict] += 1

    def _warn(self, text: str, *values: object) -> None:
        with self._lock:
            self._num_warned += 1
            number = self._num_warned
        if number <= _MAX_WARNINGS:
            last = "; further ones are only counted" if number == _MAX_WARNINGS else ""
            logger.warning(f"{text}; it scores 0{last}", *values)

    def take_counts(self) -> dict[str, int]:
        """See `Reward`."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {verdict: counts[verdict] for verdict in COUNTED}

    def close(self) -> None:
        """See `Reward`."""
        self._pool.close()
