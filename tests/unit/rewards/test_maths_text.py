r"""The final answer in a response, and spellings that mean the same (CASES section 10)."""

import time

import pytest

from rollverify.rewards.spelling import MAX_ANSWER_CHARACTERS, last_box, written_form
from rollverify.rewards.words import is_prose, is_same_text


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"First \boxed{35}. No: \boxed{4}", "4"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}} is the set", r"\{1,2\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\fbox{42}", "42"),
        (r"\boxed {7}", "7"),
        (r"\boxed 7.", "7"),
        (r"\\boxed{7}", "7"),
        (r"\boxed{\boxed{3}+1}", r"\boxed{3}+1"),
        (r"\boxed{4} and again \boxed{3", "4"),
        (r"\boxed{4 and \boxed{3}", "3"),
        (r"\boxed{}", ""),
        (r"the answer is 5", None),
        (r"\boxed{5", None),
        ("", None),
    ],
)
def test_the_last_complete_box_is_found(text, box):
    assert last_box(text) == box


def test_a_box_longer_than_an_answer_is_none_and_hides_earlier_ones():
    assert last_box(r"\boxed{4} \boxed{" + "1+" * MAX_ANSWER_CHARACTERS + "1}") is None


@pytest.mark.parametrize(
    "text",
    [r"\boxed{" * 20_000 + "}" * 20_000, r"\boxed{" * 20_000, "\\" * 100_000, "{" * 100_000],
    ids=["nested", "never closed", "backslashes", "braces"],
)
def test_hostile_text_is_read_in_linear_time(text):
    """20,000 boxes that each scan to the end would be 4e9 steps: minutes, not below 5 s."""
    start = time.process_time()
    last_box(text)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"$\dfrac12$.", r"\frac12"),
        (r"\left( 1,\, 2 \right)", "( 1, 2 )"),
        (r"28 \text{ percent}", r"28\%"),
        ("28 percent", "28%"),
        (r"1{,}250", "1,250"),
        (r"1\,250", "1250"),
        (r"\$5", "5"),
        (r"90^{\circ}", "90"),
        (r"\textbf{7}", r"\text{7}"),
        (r"{{7}}", "7"),
        (r"\boxed{7}", "7"),
        ("**7**", "7"),
        ("\u22127", "-7"),
    ],
)
def test_spellings_get_one_form(one, other):
    assert "".join(written_form(one).split()) == "".join(written_form(other).split())


def test_row_ends_of_a_matrix_are_kept():
    assert r"1\\2" in written_form(r"\begin{pmatrix}1\\2\end{pmatrix}")


@pytest.mark.parametrize(
    ("gold", "answer", "is_same"),
    [
        (r"\text{Evelyn}", "evelyn", True),
        (r"\text{(C)}", "C", True),
        (r"\text{east}", r"\text{west}", False),
        ("x", "X", False),
        ("1 , 2", "1,2", True),
        ("1000000", "1 000 000", True),
        ("12", "1 2", False),
        ("2 1/3", "21/3", False),
    ],
)
def test_words_agree_whatever_their_case(gold, answer, is_same):
    assert is_same_text(gold, answer) is is_same


@pytest.mark.parametrize("gold", ["", "see figure", r"\text{see figure}", "N/A", "?", "long proof"])
def test_gold_without_an_answer_is_prose(gold):
    """CASES RW03."""
    assert is_prose(gold)


@pytest.mark.parametrize("gold", ["5", "even", r"\text{two real roots}", "35 cm", "2 and 3", "xyz"])
def test_gold_with_an_answer_is_not_prose(gold):
    assert not is_prose(gold)
