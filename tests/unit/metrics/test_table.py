"""The end table: alignment."""

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
