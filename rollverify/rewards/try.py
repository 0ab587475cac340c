r"""Grades a file of answers as mathematics and shows why: python -m rollverify.rewards.try FILE.

Each row of FILE holds the gold answer in "answer" or "gold", and a "response" whose last \boxed{}
is read.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rollverify.data.rows import Row, read_rows
from rollverify.errors import USER_ERROR_EXIT_CODE, DataError, UserError
from rollverify.rewards.maths import MathReward
from rollverify.rewards.numbers import read_number

GOLD_COLUMNS = ("answer", "gold")
RESPONSE_COLUMNS = ("response",)
TIME_OUT_S = 10.0
"""Limit of one comparison, as that of a run by default."""


def main(arguments: Sequence[str]) -> int:
    """Print what was read from each row, verdict and reason, and a summary; the exit code."""
    reward = MathReward(time_out_s=TIME_OUT_S, num_workers=1)
    try:
        if len(arguments) != 1:
            raise DataError("name one file: python -m rollverify.rewards.try FILE")
        _grade(Path(arguments[0]), reward)
    except Exception as error:
        if not isinstance(error, UserError):
            raise
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    finally:
        reward.close()
    return 0


def _grade(path: Path, reward: MathReward) -> None:
    if not path.is_file():
        raise DataError(f"{path} is no file; name one of rows with an answer and a response")
    verdicts: Counter[str] = Counter()
    for row in read_rows(path, [*GOLD_COLUMNS, *RESPONSE_COLUMNS]):
        graded = reward.explain(_text_of(row, GOLD_COLUMNS), _text_of(row, RESPONSE_COLUMNS))
        verdicts[graded.verdict] += 1
        print(f"{row.place}: {graded.verdict}, {graded.rule}")
        print(f"  gold   {_reading(graded.gold)}")
        print(f"  answer {'none' if graded.answer is None else _reading(graded.answer)}")
    if not verdicts:
        raise DataError(f"{path} is empty; give it rows with an answer and a response")
    counts = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.most_common())
    print(f"{verdicts.total()} graded: {counts}")


def _reading(text: str) -> str:
    number = read_number(text)
    if number is None:
        return text
    sign = "%" * number.is_percent
    return f"{text}  (number {number.value}{sign}{', unit ' * bool(number.unit)}{number.unit})"


def _text_of(row: Row, columns: Sequence[str]) -> str:
    """What the first of some columns that the row has holds: a text or a number."""
    for column in columns:
        value = row.values.get(column)
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
    raise DataError(
        f"{row.place}: no text or number in {' or '.join(map(repr, columns))}; write one, as in "
        '{"answer": "4", "response": "so \\\\boxed{4}"}'
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
