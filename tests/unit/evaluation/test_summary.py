"""The numbers of one model and the change between two, by hand."""

import dataclasses

import pytest
from unit.evaluation.examples import problem, response

from rollverify.evaluation.summary import compare, summarize
from rollverify.metrics.statistics import wilson

# Right answer "a". Greedy: 1 of 2. Samples: 3 of 4 and 1 of 4.
FIRST = problem(0, "a", ["a", "a", "b", "a"])
SECOND = problem(1, "b", ["b", "a", "b", "c"])


def test_shares_by_hand():
    found = summarize([FIRST, SECOND], has_answers=True)
    values = {name: one.value for name, one in found.items() if "tokens" not in name}
    assert values == pytest.approx(
        {
            "greedy_accuracy": 1 / 2,
            "avg_at_4": 4 / 8,
            # c = 3: no 2-subset is all wrong; c = 1: 1 - C(3,2) / C(4,2) = 1 / 2.
            "pass_at_2": (1 + 1 / 2) / 2,
            "pass_at_4": 1.0,
            "maj_at_4": (1 + 0) / 2,  # a a b a: a; b a b c: b.
            "truncated_frac": 0.0,
        }
    )


def test_greedy_interval_counts_problems():
    found = summarize([FIRST, SECOND], has_answers=True)
    assert found["greedy_accuracy"].interval == pytest.approx(wilson(0.5, 2))
    # avg@4 0.75 and 0.25: variance of the mean 1/16, 0.25 * 16 = 4 trials.
    assert found["avg_at_4"].interval == pytest.approx(wilson(0.5, 4))


def test_a_reward_without_answers_has_no_majority():
    found = summarize([FIRST, SECOND], has_answers=False)
    assert "pass_at_4" in found and not any(name.startswith("maj") for name in found)


def test_a_single_sample_has_neither_pass_nor_majority():
    found = summarize([problem(0, "a", ["b"])], has_answers=True)
    assert {name for name in found if "_at_" in name} == {"avg_at_1"}


def test_lengths_and_truncation_by_hand():
    responses = (
        response("a", num_tokens=10),
        response("b", num_tokens=30),
        response(None, num_tokens=50, is_cut=True),
        response("b", num_tokens=70),
    )
    found = summarize([dataclasses.replace(FIRST, sampled=responses)], has_answers=True)
    assert {k: v.value for k, v in found.items() if "tokens" in k or "trunc" in k} == {
        "truncated_frac": 1 / 4,
        "response_tokens_mean": 40,  # 160 / 4
        "response_tokens_median": 40,  # between 30 and 50
        "response_tokens_max": 70,
        "response_tokens_right_mean": 10,
        "response_tokens_wrong_mean": 50,  # 150 / 3
    }


def test_change_is_taken_problem_by_problem():
    before = {0: problem(0, "b", ["a", "b"]), 1: problem(1, "a", ["b", "b"])}
    after = {0: problem(0, "a", ["a", "a"]), 1: problem(1, "a", ["a", "b"])}
    found = compare(after, before, has_answers=True)
    # Greedy: +1, 0. avg@2: +1/2, +1/2: no spread, so no interval.
    greedy, average = found["greedy_accuracy"], found["avg_at_2"]
    assert (greedy.difference, greedy.num_better, greedy.num_worse) == (0.5, 1, 0)
    # 0.5 +- 12.7062 * sqrt(1/2) / sqrt(2)
    assert greedy.interval == pytest.approx((0.5 - 6.3531, 0.5 + 6.3531), abs=1e-4)
    assert (average.difference, average.num_better, average.interval) == (0.5, 2, None)


def test_a_worse_problem_is_counted_as_worse():
    found = compare({0: problem(0, "b", ["b"])}, {0: problem(0, "a", ["a"])}, has_answers=True)
    assert (found["greedy_accuracy"].difference, found["greedy_accuracy"].num_worse) == (-1.0, 1)
