r"""Reward 1 when the last box of a response holds the expected maths answer, else 0.

Comparing what is written alike, and plain numbers, happens here; the rest goes to worker processes
with math-verify. Which prompts are left out is decided by the caller (`unreadable`).
"""

import importlib.util
import logging
import threading
from collections import Counter
from collections.abc import Sequence

from rollverify.data.prompts import Prompt
from rollverify.errors import ConfigError
from rollverify.rewards.math_answer import (
    is_prose,
    is_same_text,
    last_box,
    written_form,
)
from rollverify.rewards.math_numbers import compare_plain, is_plain
from rollverify.rewards.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

WORKER_MODULE = "rollverify.rewards.math_worker"

_PACKAGE = "math-verify==0.9.0"
_MAX_REMEMBERED = 50_000
_MAX_WARNINGS = 20

COUNTED = ("error", "timeout", "gold_unreadable")
"""Verdicts that are no statement on the response; each gives reward 0 and is counted."""


class MathReward:
    r"""Scores responses against `Prompt.answer`, which is LaTeX without dollars.

    The rule:

    - the last complete `\boxed{}` or `\fbox{}` of the response counts, whatever is said outside it;
      the prompt's own text is never read;
    - no box, a box cut off by the length limit, or one of more than 2,000 characters: 0;
    - the answer means the same as the gold one: 1. `docs/rewards.md` lists the matters of policy;
    - a comparison that fails or runs into its time limit: 0, and it is counted apart.

    It may be called from any thread.
    """

    def __init__(self, *, time_out_s: float, num_workers: int) -> None:
        """Set up; processes start when the first answer needs one.

        Args:
            time_out_s: seconds that one comparison may take.
            num_workers: processes that compare; more than one serves `score_all` only.

        Raises:
            ConfigError: if math-verify is not installed.
        """
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                f"data.reward = 'math' needs {_PACKAGE}, which is not installed; run "
                f"`pip install {_PACKAGE}` in this environment"
            )
        self._pool = WorkerPool(WORKER_MODULE, num_workers=num_workers, time_out_s=time_out_s)
        self._lock = threading.Lock()
        self._remembered: dict[tuple[str, str], str] = {}
        self._once_late: set[tuple[str, str]] = set()
        self._num_warned = 0
        self._counts: Counter[str] = Counter()

    def __call__(self, prompt: Prompt, response_text: str) -> float:
        """1.0 if the answer of the response is right, else 0.0.

        Args:
            prompt: its `answer` is the gold answer.
            response_text: decoded response tokens alone, without special tokens.
        """
        return self.score_all([(prompt, response_text)])[0]

    def score_all(self, pairs: Sequence[tuple[Prompt, str]]) -> list[float]:
        """The same for many responses at once, spread over the workers; in their order."""
        verdicts, questions = [], {}
        for prompt, response_text in pairs:
            gold, box = written_form(prompt.answer), last_box(response_text)
            answer = "" if box is None else written_form(box)
            verdict = self._verdict_here(gold, answer)
            if verdict is None:
                questions.setdefault((gold, answer), []).append(len(verdicts))
            verdicts.append(verdict)
        replies = self._pool.ask_all([{"gold": g, "answer": a} for g, a in questions])
        for (question, places), reply in zip(questions.items(), replies, strict=True):
            verdict = str(reply["verdict"])
            self._remember(question, verdict, str(reply.get("why", "")))
            for place in places:
                verdicts[place] = verdict
        with self._lock:
            self._counts.update(one for one in verdicts if one in COUNTED)
        return [float(verdict == "right") for verdict in verdicts]

    def unreadable(self, prompts: Sequence[Prompt]) -> list[int]:
        """Indices of prompts whose answer nothing could be compared with; they must be left out."""
        golds = [written_form(prompt.answer) for prompt in prompts]
        unclear = [g for g in dict.fromkeys(golds) if not is_prose(g) and not is_plain(g)]
        replies = self._pool.ask_all([{"gold": gold, "answer": "0"} for gold in unclear])
        # An error or time-out against "0" would be one against every response, too.
        bad = {g for g, reply in zip(unclear, replies, strict=True) if reply["verdict"] in COUNTED}
        return [index for index, g in enumerate(golds) if g in bad or is_prose(g)]

    def take_counts(self) -> dict[str, int]:
        """Graded responses per verdict of `COUNTED` since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return {name: counts[name] for name in COUNTED}

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()

    def _verdict_here(self, gold: str, answer: str) -> str | None:
        """The verdict if no worker is needed for it."""
        if is_prose(gold):
            return "gold_unreadable"
        if not answer:
            return "wrong"
        if (gold, answer) in self._remembered:
            return self._remembered[gold, answer]
        if is_same_text(gold, answer):
            return "right"
        is_right = compare_plain(gold, answer)
        return None if is_right is None else "right" if is_right else "wrong"

    def _remember(self, question: tuple[str, str], verdict: str, why: str) -> None:
        """Keep a verdict on the answer itself, or a second time-out; say why there is none."""
        with self._lock:
            if verdict in COUNTED:
                self._warn(question, verdict, why)
            if verdict == "error":
                return
            if verdict == "timeout" and question not in self._once_late:
                self._once_late.add(question)  # once may be the machine's fault, twice is not
                return
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
                self._once_late.clear()
            self._remembered[question] = verdict

    def _warn(self, question: tuple[str, str], verdict: str, why: str) -> None:
        self._num_warned += 1
        if self._num_warned > _MAX_WARNINGS:
            return
        logger.warning(
            "grading gave %s (%s) for the answer %.60r, gold %.60r; it scores 0%s",
            verdict,
            why or "no formula",
            question[1],
            question[0],
            "; further ones are only counted" if self._num_warned == _MAX_WARNINGS else "",
        )
