"""Records of made-up problems; imported by the tests of this folder."""

from collections.abc import Sequence

from rollverify.evaluation.records import ProblemRecord, ResponseRecord


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
