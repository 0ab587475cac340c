"""The end table: alignment and refusal of ragged rows."""

import pytest

from rollverify.metrics.report import summary_table


def test_columns_are_aligned_under_the_header():
    rows = [("accuracy", "before", "after"), ("greedy", "0.41", "0.702"), ("mean@8", "0.39", "0.6")]
    assert summary_table(rows).splitlines() == [
        "accuracy  before  after",
        "-----------------------",
        "greedy      0.41  0.702",
        "mean@8      0.39    0.6",
    ]


def test_no_rows_give_nothing():
    assert summary_table([]) == ""


def test_a_ragged_row_is_refused():
    with pytest.raises(ValueError, match="row 1 has 1 cells, header 2"):
        summary_table([("a", "b"), ("c",)])
