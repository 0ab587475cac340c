"""Records of made-up problems; imported by the tests of this folder."""

from collections.abc import Callable, Sequence
from typing import Any

from rollverify.config.tables import EvaluationConfig
from rollverify.evaluation.evaluator import Evaluator
from rollverify.evaluation.records import ProblemRecord, ResponseRecord
from rollverify.rewards import Reward
from rollverify.rollout.prompt_queue import EncodedPrompt


class Answers(Reward):
    """Reads answers with `answer_of`, if it has that, and grades in so many threads."""

    def __init__(
        self, num_threads: int = 0, answer_of: Callable[[str], str | None] | None = None
    ) -> None:
        self.num_threads = num_threads
        self.has_answers = answer_of is not None
        self._answer_of = answer_of

    def answer_of(self, response_text: str) -> str | None:
        return self._answer_of(response_text) if self._answer_of else None


def encoded(count: int, grade: Callable[[Any], float]) -> list[EncodedPrompt]:
    """Problems 0, 1, ... of one token each."""
    return [
        EncodedPrompt(token_ids=(number,), grade=grade, prompt_index=number)
        for number in range(count)
    ]


def evaluator(
    engine: Any, problems: Sequence[EncodedPrompt], reward: Reward | None = None, **changes: Any
) -> Evaluator:
    """At most four tokens a response; its text is as long as its ids are many."""
    settings = {"samples_per_problem": 2, "temperature": 0.8, "top_p": 0.9, "every_steps": 2}
    own = {name: changes.pop(name) for name in set(changes) & set(EvaluationConfig.model_fields)}
    values: dict[str, Any] = {"max_response_tokens": 4, "run_seed": 5} | changes
    return Evaluator(
        engine=engine,
        problems=problems,
        settings=EvaluationConfig.model_validate(settings | own),
        reward=reward or Answers(),
        decode=lambda ids: "x" * len(ids),
        **values,
    )


def response(
    answer: str | None, *, gold: str = "a", num_tokens: int = 10, is_cut: bool = False
) -> ResponseRecord:
    """A response that is right if its answer is the expected one."""
    return ResponseRecord(
        reward=float(answer == gold),
        num_tokens=num_tokens,
        finish_reason="length" if is_cut else "stop",
        answer=answer,
        text=f"{answer}\n",
    )


def problem(index: int, greedy: str, sampled: Sequence[str | None]) -> ProblemRecord:
    """A problem whose right answer is "a"."""
    return ProblemRecord(
        index=index,
        problem_id=f"p{index}",
        gold="a",
        greedy=response(greedy),
        sampled=tuple(response(one) for one in sampled),
    )
