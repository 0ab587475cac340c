"""A user's own reward: a function of a module or a file, called in worker processes.

`score(response: str, row: dict) -> float`, where row holds every column of the data row, and "id",
"prompt" (the problem without templates) and "answer".
"""

import inspect
import math
import operator
import sys
import traceback
from collections.abc import Callable
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

from rollverify.config import function
from rollverify.data.prompts import Prompt
from rollverify.errors import ConfigError, RewardError
from rollverify.rewards.pool import WorkerPool
from rollverify.rewards.reward import WorkerReward

Score = Callable[[str, dict[str, Any]], float]
"""(decoded response without special tokens, data row) -> score."""


class FunctionReward(WorkerReward):
    """Scores by a user's function; one that takes too long scores 0 and is counted."""

    def __init__(self, name: str, *, time_out_s: float, num_workers: int) -> None:
        """Import the function in a first worker; raises a ConfigError if that fails."""
        super().__init__(
            WorkerPool(
                f"{__name__}:worker_start", name, num_workers=num_workers, time_out_s=time_out_s
            )
        )
        self._name = name
        try:
            self._pool.check()
        except ConfigError:
            self.close()
            raise

    def __call__(self, prompt: Prompt, response_text: str) -> float:
        """Score a response; raises a RewardError unless it gives a finite number in time."""
        row = {
            **prompt.columns,
            "id": prompt.prompt_id,
            "prompt": prompt.bare_text,
            "answer": prompt.answer,
        }
        kind, found = self._pool.ask(response_text, row)
        if kind == "timeout":
            self._count("timeout")
            self._warn(
                "reward %r took over %g s for prompt %r",
                self._name,
                self._pool.time_out_s,
                prompt.prompt_id,
            )
            return 0.0
        if not isinstance(found, float):
            raise RewardError(
                f"reward {self._name!r}, prompt {prompt.prompt_id!r}: {found}; it must return a "
                "finite number for every response"
            )
        return found


def worker_start(name: str) -> Callable[[], Callable[..., float | str]]:
    """What workers call; the user's module is imported there, not in what they are forked from."""
    return lambda: partial(_score, _load(name))


def _load(name: str) -> Score:
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py"):
        sys.path.insert(0, str(Path(place).resolve().parent))  # for modules beside it
    try:
        score = operator.attrgetter(attribute)(function.import_place(place))
        if isinstance(score, type):
            score = score()
        inspect.signature(score).bind("", {})
        if inspect.iscoroutinefunction(score):
            raise TypeError("it is async")
    except BaseException as error:  # whatever the user's code does while it is imported
        raise ConfigError(
            f"data.reward = {name!r} cannot be used: {_said(error)}; name a plain function "
            "score(response, row) as module:function or path/to/file.py:function"
        ) from error
    return score


def _score(score: Score, response: str, row: dict[str, Any]) -> float | str:
    try:
        found = score(response, row)
        if isinstance(found, Real) and math.isfinite(found):
            return float(found)
        return f"it returned {' '.join(repr(found).split())[:100]} ({type(found).__name__})"
    except BaseException as error:  # also SystemExit: the user's code ends one call, no process
        return _said(error)


def _said(error: BaseException) -> str:
    """One line: type, message and the deepest place in a file that is nobody's library."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    places = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in (__file__, function.__file__, "<frozen importlib._bootstrap>")
        and "/lib/python" not in frame.filename
    ]
    return f"{text} ({places[-1]})" if places else text
