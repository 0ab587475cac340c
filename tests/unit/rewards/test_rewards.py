"""Rewards by name, and prompts whose answer a reward cannot read."""

import logging

import pytest

from rollverify.data.prompts import Prompt
from rollverify.errors import ConfigError, DataError
from rollverify.rewards import exact_answer, make_reward, readable_indices, reward_class

SOURCE = "train.jsonl"


def prompts(*answers):
    return [Prompt(prompt_id=f"p{i}", text="t", answer=answer) for i, answer in enumerate(answers)]


@pytest.fixture(scope="module")
def maths():
    reward = make_reward("math", time_out_s=5.0, num_workers=1)
    yield reward
    reward.close()


def test_exact_answer_needs_no_process_and_counts_nothing():
    reward = make_reward("exact_answer", time_out_s=1.0, num_workers=1)
    assert reward.num_threads == 0 and reward.take_counts() == {}
    reward.close()


@pytest.mark.parametrize(
    ("name", "has_answers"),
    [
        ("exact_answer", True),
        ("math", True),
        ("my.rewards:score", False),
        ("my_rewards:Judge.score", False),
        ("../some where/rewards.py:score", False),
    ],
)
def test_names_of_rewards(name, has_answers):
    assert reward_class(name).has_answers is has_answers


@pytest.mark.parametrize("name", ["", "maths", "my_rewards", "my_rewards:", ":f", "a b:f", "a:f()"])
def test_other_names_are_refused(name):
    with pytest.raises(ConfigError, match=r"data\.reward must be one of exact_answer, math, mod"):
        make_reward(name, time_out_s=1.0, num_workers=1)


def test_prompts_with_unreadable_gold_are_left_out_and_counted(maths, caplog):
    """CASES RW03."""
    with caplog.at_level(logging.WARNING):
        assert readable_indices(prompts("5", "see figure", "1/2"), maths, SOURCE) == [0, 2]
    assert "train.jsonl: gold unreadable in 1 of 3 prompts" in caplog.text and "'p1'" in caplog.text


def test_a_file_without_any_readable_answer_is_refused(maths):
    with pytest.raises(DataError, match=r"train\.jsonl: no 'answer' can be read as mathematics"):
        readable_indices(prompts("see figure", "?"), maths, SOURCE)


def test_exact_answer_leaves_no_prompt_out():
    """An answer of two lines is an error with its place, in `load_encoded`, and not left out."""
    assert readable_indices(prompts("5", "5\n6"), exact_answer, SOURCE) == [0, 1]


def test_counts_are_taken_once(maths):
    maths(prompts("see figure")[0], r"\boxed{5}")
    assert [maths.take_counts()["gold_unreadable"] for _ in range(2)] == [1, 0]
