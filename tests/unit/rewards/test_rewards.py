"""Rewards by name, and prompts whose answer a reward cannot read."""

import logging

import pytest

from rollverify.data.prompts import Prompt
from rollverify.errors import ConfigError, DataError
from rollverify.rewards import (
    close_reward,
    counts_of,
    exact_answer,
    make_reward,
    math_reward,
    readable_indices,
)

SOURCE = "train.jsonl"


def prompts(*answers):
    return [Prompt(prompt_id=f"p{i}", text="t", answer=answer) for i, answer in enumerate(answers)]


@pytest.fixture
def maths():
    reward = make_reward("math", time_out_s=5.0, num_workers=1)
    yield reward
    close_reward(reward)


def test_exact_answer_needs_no_process_and_counts_nothing():
    reward = make_reward("exact_answer", time_out_s=1.0, num_workers=1)
    assert reward is exact_answer and counts_of(reward) is None
    close_reward(reward)


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


def test_a_missing_package_is_an_error_with_a_cure(monkeypatch):
    monkeypatch.setattr(math_reward.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install math-verify==0\.9\.0"):
        make_reward("math", time_out_s=1.0, num_workers=1)


def test_counts_are_taken_once(maths):
    maths(prompts("see figure")[0], r"\boxed{5}")
    take = counts_of(maths)
    assert take()["gold_unreadable"] == 1 and take()["gold_unreadable"] == 0
