"""The report: every table, honest about what is missing."""

import csv
import json

import pytest
from unit.study.folders import records, study

from rollverify.errors import ConfigError
from rollverify.metrics.statistics import Interval, spread
from rollverify.study.figures import FIGURES
from rollverify.study.records import read_run
from rollverify.study.report import markdown, run_rows, write_report
from rollverify.study.results import collect
from rollverify.study.tables import NOTHING, Table, all_tables, interval_cell, number, spread_cell

CLAIM = {"text": "It is faster", "kind": "fewer_decode_steps", "factor": 1.9}
CLAIM |= {"arm": "rollverify", "other": "on_policy"}
ACCURACIES = {"on_policy": (0.6, 0.8), "rollverify": (0.5, 0.75)}
STARTS = [{"date": "2026-01-01", "machine": "two cores"}]


@pytest.fixture
def results(tmp_path):
    found = records(tmp_path / "runs", ACCURACIES, rollout__decode_steps=5.0)
    return collect(study(claims=[CLAIM]), found)


def rows_of(results, title):
    (table,) = [table for table in all_tables(results) if table.title == title]
    header, *rows = table.rows
    return {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}


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
    assert interval_cell(Interval(-0.1, 0.25), "share", "+") == "[-0.100, +0.250]"
    assert interval_cell(None, "share") == NOTHING


def test_markdown_by_hand():
    table = Table("T", "How to read it.", [["a", "b"], ["x|y", "2"]])
    assert table.markdown() == (
        "## T\n\nHow to read it.\n\n| a | b |\n| --- | ---: |\n| x\\|y | 2 |\n"
    )


def test_accuracy_by_hand(results):
    row = rows_of(results, "Accuracy at equal updates")["RollVerify"]
    assert row["mean@k"] == "0.625 ± 0.177" and row["seeds"] == "0.500 / 0.750"
    # 0.625 +- 12.7062 * 0.1768 / sqrt(2)
    assert row["95 % of the mean"] == "[-0.963, 2.213]"
    assert row["against the baseline"].startswith("-0.075 [")


def test_relative_cost_by_hand(results):
    row = rows_of(results, "Cost of decoding by the model")["RollVerify"]
    assert row["c1/c0 = 0"] == "2.00 x" and row["slot-steps alone"] == "1.00 x"
    # (30 + 0.01 * 60) / (15 + 0.01 * 60)
    assert row["c1/c0 = 0.01"] == "1.96 x" and row["even with the baseline at"] == NOTHING


def test_wall_time_is_compared_with_the_baseline(results):
    assert rows_of(results, "Wall time here")["RollVerify"]["times the baseline"] == "1.00"


def test_claims_are_judged(results):
    row = rows_of(results, "Expected and found")["It is faster"]
    assert row == {"came out": "held", "numbers": "15 against 30: 2.00 x fewer"}


def test_what_is_missing_is_named_in_the_report_and_in_the_cells(results):
    found = [record for arm in results.arms for record in arm.records]
    found[-1] = read_run("rollverify", 1, None)
    made = collect(results.study, found)
    text = markdown(made, all_tables(made), STARTS, [])
    assert "## Missing data" in text
    assert "- rollverify, seed 1: there is no run folder" in text
    assert "0.500 (1 of 2)" in text and f"0.500 / {NOTHING}" in text
    assert run_rows(made)[-1][-1] == "there is no run folder"


def test_a_study_without_any_run_has_a_report(tmp_path):
    planned = [(arm.name, seed) for arm in study().arms for seed in study().seeds]
    made = collect(study(claims=[CLAIM]), [read_run(*run, None) for run in planned])
    file = write_report(made, tmp_path / "report", starts=[], plots=False)
    assert "not decided" in file.read_text() and "- not known" in file.read_text()


def test_the_report_says_what_each_arm_changes_and_where_it_was_run(results):
    text = markdown(results, all_tables(results), STARTS, [])
    assert '- **RollVerify** changes `method.name: "on_policy" -> "rollverify"`' in text
    assert "- date: 2026-01-01, machine: two cores" in text
    assert "## Missing data" not in text


def test_numbers_are_in_csv_and_json(results, tmp_path):
    folder = tmp_path / "report"
    write_report(results, folder, starts=STARTS, plots=False)
    rows = list(csv.DictReader((folder / "runs.csv").open()))
    assert [(row["arm"], row["seed"], row["mean_at_k (share)"]) for row in rows] == [
        ("on_policy", "0", "0.6"),
        ("on_policy", "1", "0.8"),
        ("rollverify", "0", "0.5"),
        ("rollverify", "1", "0.75"),
    ]
    assert rows[0]["switched_at (step)"] == ""
    values = json.loads((folder / "report.json").read_text())
    assert values["arms"]["rollverify"]["figures"]["mean_at_k"] == [0.5, 0.75]
    assert values["claims"][0]["held"] is True
    assert values["equal_cost"].keys() == {"0.002", "0.005", "0.01", "seconds"}
    assert values["figures"].keys() == FIGURES.keys() and values["missing"] == []


def test_a_report_without_its_baseline_has_no_comparison(results):
    alone = study(arms=[{"name": "rollverify"}], baseline="rollverify")
    made = collect(alone, results.arms[1].records)
    row = rows_of(made, "Accuracy at equal updates")["rollverify"]
    assert row["against the baseline"] == NOTHING


def test_a_folder_that_cannot_be_written_is_named(results, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(results, tmp_path / "file" / "report", starts=[], plots=False)
