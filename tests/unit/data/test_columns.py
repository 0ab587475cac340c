"""From rows to prompt, answer and id: column names, answer formats, and what is refused."""

import pytest

from rollverify.data.columns import Columns, answer_of, id_of, prompt_of
from rollverify.data.rows import Row
from rollverify.errors import DataError


def row_of(**values):
    return Row(place="set.jsonl:3", number=3, values=values)


def answer(value, answer_format="text"):
    return answer_of(row_of(answer=value), Columns(), answer_format)


def test_of_several_names_the_first_that_is_there_counts():
    columns = Columns(prompt=("question", "problem"))
    assert prompt_of(row_of(problem="b"), columns) == "b"
    assert prompt_of(row_of(problem="b", question="a"), columns) == "a"


def test_a_dotted_name_is_a_column_or_lies_inside_one():
    columns = Columns(answer=("reward_model.ground_truth",))
    assert answer_of(row_of(reward_model={"ground_truth": "34"}), columns, "text") == "34"
    both = {"reward_model": {"ground_truth": "34"}, "reward_model.ground_truth": "35"}
    assert answer_of(row_of(**both), columns, "text") == "35"


def test_a_conversation_of_one_user_message_is_its_content():
    message = {"role": "user", "content": "1 + 1?"}
    assert prompt_of(row_of(prompt=[message]), Columns()) == "1 + 1?"


SYSTEM = {"role": "system", "content": "x"}
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize("messages", [[], [SYSTEM], [SYSTEM, USER], [USER, USER], ["x"]])
def test_other_conversations_are_refused(messages):
    with pytest.raises(DataError, match=r"set\.jsonl:3: 'prompt' must be a text or a conversation"):
        prompt_of(row_of(prompt=messages), Columns())


def test_a_number_too_large_for_a_float_keeps_its_digits():
    """1.8e308 is the largest float, 10^400 has 401 digits."""
    assert answer(10**400) == answer(10**400, "integer") == "1" + "0" * 400


def test_what_is_no_text_comes_with_a_cure():
    with pytest.raises(DataError, match=r"got bool True; write it in quotes or drop the line$"):
        answer(True)


@pytest.mark.parametrize(
    ("value", "text"),
    [("\\frac{1}{2}", "\\frac{1}{2}"), ("0.50", "0.50"), (42, "42"), (27.0, "27"), (0.1, "0.1")],
)
def test_text_answers_stay_as_they_are_and_numbers_become_digits(value, text):
    assert answer(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("She makes 9 * 2 = <<9*2=18>>18.\n#### 18", "18"),
        ("a\n#### 1,450,000", "1450000"),
        ("#### 5\nno:\n#### -3 ", "-3"),
    ],
)
def test_gsm8k_answers_stand_after_the_last_hashes_without_commas(value, text):
    assert answer(value, "hashes") == text


@pytest.mark.parametrize(
    ("value", "digits"),
    [
        ("204", "204"),
        ("025", "25"),
        ("000", "0"),
        ("27.0", "27"),
        (27.0, "27"),
        (70, "70"),
        (" 1,024 ", "1024"),
        ("-7", "-7"),
        ("-0", "0"),
        ("+3.", "3"),
    ],
)
def test_whole_numbers_lose_their_spelling(value, digits):
    assert answer(value, "integer") == digits


@pytest.mark.parametrize(
    "value", ["1/2", "2.5", "1,2", "12,10,6", "$5", "1e3", "x = 5", "\uff11\uff12"]
)
def test_what_is_no_whole_number_is_refused(value):
    with pytest.raises(DataError, match=r"set\.jsonl:3: 'answer' must be a whole number"):
        answer(value, "integer")


@pytest.mark.parametrize(
    ("value", "answer_format", "message"),
    [
        ("", "text", "'answer' is empty"),  # RW03
        (" \n", "text", "'answer' is empty"),
        ("18", "hashes", "'answer' has nothing after '####'"),
        ("work\n#### ", "hashes", "'answer' has nothing after '####'"),
        ("work\n#### ,", "hashes", "'answer' has nothing after '####'"),
        (None, "text", "'answer' must be a string, got NoneType"),
        (True, "text", "'answer' must be a string, got bool True"),
        (float("nan"), "text", "'answer' must be a string, got float nan"),
        (["1", "2"], "text", "'answer' must be a string, got list"),
        ("\ud800", "text", "'answer' holds half of a character"),
    ],
)
def test_bad_answers_are_named_with_their_line(value, answer_format, message):
    with pytest.raises(DataError) as caught:
        answer(value, answer_format)
    assert str(caught.value).startswith(f"set.jsonl:3: {message}")
    assert "\n" not in str(caught.value)


def test_a_wrong_column_names_those_that_there_are():
    columns = Columns(prompt=("problem", "question"), setting="data.test_columns")
    with pytest.raises(DataError) as caught:
        prompt_of(row_of(Problem="x", answer="y"), columns)
    assert str(caught.value) == (
        "set.jsonl:3: key 'problem' or 'question' is missing; add it or name another in "
        "data.test_columns (keys found: 'Problem', 'answer')"
    )


def test_an_id_that_must_be_there_is_missed():
    assert id_of(row_of(), Columns(id=("uid",))) == "3"
    with pytest.raises(DataError, match=r"set\.jsonl:3: key 'uid' is missing"):
        id_of(row_of(), Columns(id=("uid",), requires_id=True))
