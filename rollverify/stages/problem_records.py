"""The records of test problems that ranks graded apart, joined so that every rank has all of them.

Only numbers travel: of an answer its number among those of its problem, which is all that a vote
needs. Ids, expected answers and texts stay empty. Grades nothing and computes no metrics.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from rollverify.evaluation.records import ProblemRecord, ResponseRecord
from rollverify.metrics.reduction import gather_values

_PER_RESPONSE = 4
"""Right or not, tokens, cut or not, number of the answer."""
_NO_ANSWER = -1


def graded_problem(index: int, responses: Sequence[ResponseRecord]) -> ProblemRecord:
    """The record of a problem of which only the grades matter.

    Args:
        index: place in the test set.
        responses: the greedy one first.
    """
    greedy, *sampled = responses
    return ProblemRecord(index=index, problem_id="", gold="", greedy=greedy, sampled=tuple(sampled))


def gather_records(records: Sequence[ProblemRecord], num_samples: int) -> list[ProblemRecord]:
    """Join the records of all ranks.

    Collective: yes, over the world; those of `gather_values`.

    Args:
        records: of this rank's problems, with `num_samples` samples each; there may be none.
        num_samples: the same on every rank.

    Returns:
        Every problem once, by index; equal on every rank. Ranks that share a problem, as tensor
        ranks do, have the same record of it.
    """
    values = torch.tensor([value for one in records for value in _row(one)], dtype=torch.int64)
    if dist.is_initialized():
        group = dist.group.WORLD
        assert group is not None
        (values,) = gather_values([values], group)
    rows = values.view(-1, 1 + _PER_RESPONSE * (1 + num_samples)).tolist()
    by_index = {row[0]: _record(row) for row in rows}
    return [by_index[index] for index in sorted(by_index)]


def _row(record: ProblemRecord) -> list[int]:
    numbers: dict[str | None, int] = {None: _NO_ANSWER}
    row = [record.index]
    for one in (record.greedy, *record.sampled):
        answer = numbers.setdefault(one.answer, len(numbers))
        row += [one.is_right, one.num_tokens, one.finish_reason == "length", answer]
    return row


def _record(row: Sequence[int]) -> ProblemRecord:
    responses = [
        ResponseRecord(
            reward=float(right),
            num_tokens=num_tokens,
            finish_reason="length" if is_cut else "stop",
            answer=None if answer == _NO_ANSWER else str(answer),
        )
        for right, num_tokens, is_cut, answer in zip(*[iter(row[1:])] * _PER_RESPONSE, strict=True)
    ]
    return graded_problem(row[0], responses)
