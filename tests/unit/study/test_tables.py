"""Tables as Markdown and CSV."""

from rollverify.metrics.statistics import Interval, spread
from rollverify.study.tables import (
    NOTHING,
    Table,
    interval_cell,
    number,
    spread_cell,
    to_csv,
    to_markdown,
)


def test_numbers_have_the_digits_of_their_unit():
    cells = [number(0.12345, unit) for unit in ("share", "nats", "1", "steps", "count")]
    assert cells == ["0.123", "0.123", "0.12", "0.12", "0"]
    assert (number(12345.6, "tokens"), number(12345.6, "s")) == ("12,346", "12,345.6")
    assert number(None, "share") == NOTHING


def test_a_cell_says_how_many_seeds_are_missing():
    assert spread_cell(spread([0.5, 0.7]), "share", 2) == "0.600 ± 0.141"
    assert spread_cell(spread([0.5, 0.7]), "share", 3) == "0.600 ± 0.141 (2 of 3)"
    assert spread_cell(spread([0.5]), "share", 1) == "0.500"
    assert spread_cell(None, "share", 3) == NOTHING


def test_intervals():
    assert interval_cell(Interval(-0.1, 0.25), "share") == "[-0.100, 0.250]"
    assert interval_cell(Interval(-0.1, 0.25), "share", sign=True) == "[-0.100, +0.250]"
    assert interval_cell(None, "share") == NOTHING


def test_markdown_by_hand():
    table = Table(title="T", rows=[["a", "b"], ["x|y", "2"]], note="How to read it.")
    assert to_markdown(table) == (
        "## T\n\nHow to read it.\n\n| a | b |\n| --- | ---: |\n| x\\|y | 2 |\n"
    )


def test_csv_keeps_commas_and_leaves_missing_cells_empty():
    assert to_csv([["a", "b"], ["1,000", None]]) == 'a,b\n"1,000",\n'
