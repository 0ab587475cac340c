"""Runs of words that a test and a training problem share."""

import pytest

from rollverify.data.prompts import Prompt
from rollverify.evaluation.contamination import find_overlaps


def prompts(*texts: str, name: str = "t") -> list[Prompt]:
    return [
        Prompt(prompt_id=f"{name}{number}", text=text, answer="1")
        for number, text in enumerate(texts)
    ]


def overlaps(test: list[str], train: list[str], ngram: int = 3) -> list[tuple[str, str, float]]:
    found = find_overlaps(prompts(*test), prompts(*train, name="r"), ngram)
    return [(one.test_id, one.train_id, one.share) for one in found]


def test_a_shared_run_is_found_with_its_share():
    # 3-grams of the test: "a b c", "b c d", "c d e"; the training problem holds the last two.
    assert overlaps(["a b c d e"], ["x b c d e"]) == [("t0", "r0", pytest.approx(2 / 3))]


def test_a_run_of_fewer_words_is_not_an_overlap():
    assert overlaps(["a b c d"], ["x a b y c d"]) == []
    assert overlaps(["a b c d"], ["x a b y c d"], ngram=2) == [("t0", "r0", pytest.approx(2 / 3))]


def test_case_and_punctuation_do_not_hide_it():
    assert overlaps(["What is $x^2$?"], ["what is: X 2"]) == [("t0", "r0", 1.0)]


def test_the_training_problem_with_most_is_named_and_the_share_counts_all():
    # r0 has "a b c"; r1 has "c d e" and "d e f": together 3 of the 4.
    found = overlaps(["a b c d e f"], ["a b c", "c d e f", "z z z"])
    assert found == [("t0", "r1", pytest.approx(3 / 4))]


def test_a_short_problem_is_found_only_as_a_whole():
    assert overlaps(["d10 w"], ["d10 w"]) == [("t0", "r0", 1.0)]
    assert overlaps(["d10 w"], ["d10 w x y z"]) == []


def test_signs_alone_are_compared_as_text():
    assert overlaps(["+ ="], ["- ="]) == []
    assert overlaps(["+ ="], ["+ ="]) == [("t0", "r0", 1.0)]


def test_a_template_around_every_problem_does_not_count():
    """Not even where it runs into the problem: "step by step find the"."""
    before, after = "Solve this step by step. Find the", "Write the answer on its own line."
    test = [f"{before} {one} {after}" for one in ("sum of one two", "root of three four")]
    train = [f"{before} {one} {after}" for one in ("sum of five six", "area of seven eight")]
    assert overlaps(test, train, ngram=4) == []


def test_a_problem_inside_a_template_is_still_found():
    test = [f"Solve: {one} Thanks" for one in ("a b c d", "e f g h")]
    train = [f"Question: {one}" for one in ("e f g h", "k l m n")]
    assert overlaps(test, train, ngram=4) == [("t1", "r0", 1.0)]


def test_several_test_problems_of_one_training_problem():
    assert [one[:2] for one in overlaps(["a b c", "z y x", "q a b c"], ["a b c k"])] == [
        ("t0", "r0"),
        ("t2", "r0"),
    ]


def test_a_whole_set_of_equal_problems_keeps_its_words():
    assert overlaps(["a b c"], ["a b c", "a b c"]) == [("t0", "r0", 1.0)]
