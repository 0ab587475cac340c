"""Numbers as a table and as JSON."""

from rollverify.evaluation.contamination import Overlap
from rollverify.evaluation.summary import Change, Estimate
from rollverify.evaluation.tables import (
    change_json,
    estimate_json,
    one_model_table,
    overlap_json,
    overlap_line,
    two_model_table,
)
from rollverify.metrics.statistics import Interval

SHARE = Estimate(value=0.5, interval=Interval(0.25, 0.75))
TOKENS = Estimate(value=12.34)


def cells(table: str) -> list[str]:
    """Each line below the rule, without the alignment."""
    return [" ".join(line.split()) for line in table.splitlines()[2:]]


def test_shares_are_percent_and_lengths_are_tokens():
    table = one_model_table({"avg_at_8": SHARE, "response_tokens_mean": TOKENS})
    assert cells(table) == [
        "avg@8 50.0 % 25.0 .. 75.0",
        "response tokens mean 12.3 -",
    ]


def test_a_change_has_a_sign_in_points():
    change = Change(difference=0.25, interval=Interval(-0.1, 0.6), num_better=3, num_worse=1)
    baseline = {"avg_at_8": Estimate(value=0.25)}
    (row,) = cells(two_model_table({"avg_at_8": SHARE}, baseline, {"avg_at_8": change}))
    assert row == "avg@8 25.0 % 50.0 % +25.0 -10.0 .. +60.0 3 1"


def test_a_number_that_one_model_lacks_is_a_dash():
    (row,) = cells(two_model_table({"response_tokens_right_mean": TOKENS}, {}, {}))
    assert row == "response tokens right mean - 12.3 - - - -"


def test_json_holds_both_ends_or_none():
    assert estimate_json({"a": SHARE, "b": TOKENS}) == {
        "a": {"value": 0.5, "low": 0.25, "high": 0.75},
        "b": {"value": 12.34, "low": None, "high": None},
    }


def test_json_of_a_change():
    change = Change(difference=0.25, interval=None, num_better=3, num_worse=1)
    assert change_json({"a": change}) == {
        "a": {
            "difference": 0.25,
            "low": None,
            "high": None,
            "problems_better": 3,
            "problems_worse": 1,
        }
    }


def test_contamination_names_a_few_problems_and_the_rest_of_the_numbers():
    overlaps = [
        Overlap(index=number, test_id=f"q{number}", train_id="t", share=1.0) for number in range(6)
    ]
    clean = {"model": {"greedy_accuracy": {"value": 0.1}, "avg_at_8": {"value": 0.5}}}
    report = overlap_json(overlaps, 13, 9, clean)
    assert (report["overlapping"], report["overlaps"][5]["index"]) == (6, 5)
    assert overlap_line(report) == (
        "contamination: 6 of 9 problems share 13 words in a row, or all they have, with a training "
        "problem (q0, q1, q2, q3, q4, ...); without them model avg@8 50.0 %"
    )
