"""A golden file of model answers: each gets its score, and the text that maj@k counts.

One line per answer: the expected `answer`, the model's `response`, its `reward`, the `extracted`
text, and `why`.
"""

import json
from pathlib import Path

import pytest

from rollverify.data.prompts import Prompt
from rollverify.rewards import BUILT_IN, exact_answer, make_reward

LINES = (Path(__file__).parent / "golden_answers.jsonl").read_text(encoding="utf-8").splitlines()
ROWS = [json.loads(line) for line in LINES]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["why"])
def test_an_answer_gets_its_score(row):
    prompt = Prompt(prompt_id="p", text="", answer=row["answer"])
    assert exact_answer(prompt, row["response"]) == row["reward"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["why"])
def test_an_answer_is_read_as_it_is_graded(row):
    found = exact_answer.answer_of(row["response"])
    assert found == row["extracted"]
    assert (found == row["answer"].strip()) == (row["reward"] > 0)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_reward_that_offers_answers_exists(name):
    reward = make_reward(name, time_out_s=1.0, num_workers=1)
    assert reward.has_answers and reward.answer_of("") is None
    reward.close()


def test_a_maths_answer_is_the_last_box_in_written_form():
    """maj@k counts the same text for 1/2 however the box is spaced, and none without a box."""
    texts = [r"so \boxed{ \frac{1}{2} }", r"\boxed{3} no, \boxed{\frac{1}{2}}", "0.5"]
    first, second, none = map(make_reward("math", time_out_s=1.0, num_workers=1).answer_of, texts)
    assert first == second and first is not None and none is None
