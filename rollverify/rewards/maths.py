r"""Reward 1 when the last box of a response holds the expected maths answer, else 0.

Text and plain numbers are compared here; formulas in worker processes (`symbolic.py`).
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import NamedTuple

from rollverify.data.prompts import Prompt
from rollverify.rewards.numbers import compare_plain, is_plain
from rollverify.rewards.pool import WorkerPool
from rollverify.rewards.reward import COUNTED, WorkerReward
from rollverify.rewards.spelling import last_box, written_form
from rollverify.rewards.units import are_compatible, split_text_unit
from rollverify.rewards.words import (
    compare_choices,
    compare_text_forms,
    has_joined_relations,
    is_prose,
    is_same_text,
    joined,
    parts_of,
)

MEMORY_BYTES = 3 << 30
"""Address space of a worker; a formula that needs more is an error of the grading."""

_MAX_REMEMBERED = 50_000


_PLAIN_RULES = {
    "as choices": compare_choices,
    "as numbers with what they are measured in": compare_plain,
    "as ranges, sets or letters in their order": compare_text_forms,
}
"""Comparisons that need no worker, by what is said of them; the first that fits decides."""


class Graded(NamedTuple):
    """What was read, and what became of it."""

    gold: str
    answer: str | None
    """None without a box."""
    verdict: str
    """right, wrong, or one of `COUNTED`."""
    rule: str
    """How the two were compared."""


class MathReward(WorkerReward):
    r"""Scores responses against `Prompt.answer`, which is LaTeX without dollars.

    1 if the last complete `\boxed{}` or `\fbox{}`, of at most 2,000 characters, means the same as
    the gold answer (`docs/rewards.md` lists the matters of policy), else 0. A comparison that fails
    or runs into its time limit scores 0 and is counted apart.
    """

    has_answers = True

    def __init__(self, *, time_out_s: float, num_workers: int) -> None:
        super().__init__(
            WorkerPool(
                "rollverify.rewards.symbolic:worker_start",
                num_workers=num_workers,
                time_out_s=time_out_s,
                memory_bytes=MEMORY_BYTES,
            )
        )
        self._verdicts: dict[tuple[str, str], str] = {}
        self._late: set[tuple[str, str]] = set()

    def __call__(self, prompt: Prompt, response_text: str) -> float:
        """1.0 if the answer of the response is right, else 0.0."""
        verdict = self._verdict(written_form(prompt.answer), self.answer_of(response_text) or "")
        self._count(verdict)
        return float(verdict == "right")

    def answer_of(self, response_text: str) -> str | None:
        """The content of the last box in written form."""
        box = last_box(response_text)
        return None if box is None else written_form(box) or None

    def unreadable(self, prompts: Sequence[Prompt]) -> list[int]:
        """See `Reward`."""
        golds = [written_form(prompt.answer) for prompt in prompts]
        unclear = [g for g in dict.fromkeys(golds) if not is_prose(g) and not is_plain(g)]
        with ThreadPoolExecutor(self.num_threads) as threads:
            # An error or time-out against "0" would be one against every response, too.
            verdicts = dict(
                zip(unclear, threads.map(self._formula_verdict, unclear, repeat("0")), strict=True)
            )
        return [i for i, g in enumerate(golds) if is_prose(g) or verdicts.get(g) in COUNTED]

    def explain(self, gold: str, response_text: str) -> Graded:
        """What is read from a gold answer and a response, and the verdict on it."""
        read, answer = written_form(gold), self.answer_of(response_text)
        return Graded(read, answer, *self._verdict_and_rule(read, answer or ""))

    def _verdict(self, gold: str, answer: str) -> str:
        return self._verdict_and_rule(gold, answer)[0]

    def _verdict_and_rule(self, gold: str, answer: str) -> tuple[str, str]:
        if is_prose(gold):
            return "gold_unreadable", "the gold answer is empty or a sentence"
        if not answer:
            return "wrong", "no answer in a box"
        if is_same_text(gold, answer):
            return "right", "the same text"
        for rule, compare in _PLAIN_RULES.items():
            is_right = compare(gold, answer)
            if is_right is not None:
                return "right" if is_right else "wrong", rule
        return self._formula_verdict(gold, answer), "as formulas, and words between them"

    def _formula_verdict(self, gold: str, answer: str) -> str:
        """The verdict on what is not plain: words must agree, and so must what is between them."""
        (gold, gold_unit), (answer, unit) = split_text_unit(gold), split_text_unit(answer)
        if not are_compatible(gold_unit, unit):
            return "wrong"
        gold, answer = joined(gold), joined(answer)
        if r"\text" not in gold + answer or has_joined_relations(gold + answer):
            return self._verdicts.get((gold, answer)) or self._ask(gold, answer)
        expected, found = parts_of(gold), parts_of(answer)
        if expected is None or found is None or expected[0] != found[0]:
            return "wrong"
        for one, other in zip(expected[1], found[1], strict=True):
            verdict = self._verdict(one, other) if one and other else "wrong"
            if verdict != "right" and one != other:
                return verdict
        return "right"

    def _ask(self, gold: str, answer: str) -> str:
        """The verdict of a worker, remembered unless it may be the machine's fault."""
        kind, value = self._pool.ask(gold, answer)
        verdict = value if kind == "answer" else kind
        if verdict in COUNTED:
            text = "grading gave %s (%s) for the answer %.60r, gold %.60r"
            self._warn(text, verdict, value if kind == "error" else "no verdict", answer, gold)
        if verdict == "error" or (verdict == "timeout" and (gold, answer) not in self._late):
            self._late.add((gold, answer))  # a second time-out is believed
            return verdict
        if len(self._verdicts) >= _MAX_REMEMBERED:
            self._verdicts.clear()
            self._late.clear()
        self._verdicts[gold, answer] = verdict
        return verdict
