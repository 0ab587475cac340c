"""Reading a run folder: what is missing has a name."""

import pytest
from unit.study.folders import STEPS, drop_line, write_run

from rollverify.study.records import read_run


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "run")


def missing(folder):
    return read_run("a", 0, folder).missing


def test_a_complete_folder_lacks_nothing(folder):
    record = read_run("a", 7, folder)
    assert record.missing == [] and record.is_complete
    assert list(record.steps.index) == [1, 2, 3] and sorted(record.evaluations) == [0, STEPS]
    assert (record.name, len(record.cuts), len(record.slots)) == ("a, seed 7", 2, 3)


def test_no_folder_is_missing():
    assert missing(None) == ["there is no run folder"]


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "cuts.jsonl", "slots.jsonl"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert missing(folder)[0].startswith(f"{name} is missing")


def test_only_what_is_verified_has_cuts(tmp_path):
    folder = write_run(tmp_path / "run", {"method.name": "on_policy"})
    (folder / "cuts.jsonl").unlink()
    assert missing(folder) == []


def test_damage_is_named(folder):
    (folder / "config.json").write_text('{"run"')
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    assert missing(folder)[:2] == [
        "config.json is missing or damaged",
        "line 5 of metrics.jsonl is damaged",
    ]


@pytest.mark.parametrize(
    ("settings", "changes", "line", "expected"),
    [
        ({}, {}, 0, ["the evaluation of the base model is missing"]),
        ({}, {"has_final": False}, None, ["the final evaluation, after step 3, is missing"]),
        (
            {"training.steps": 9, "evaluation.enable": False},
            {"num_steps": 6},
            3,
            ["steps 3, 7-9 of 9 not logged", "evaluation is off, so there is no accuracy"],
        ),
        (
            {},
            {"train__entropy_nats": None},
            None,
            ["train/entropy_nats is missing or not finite in steps 1-3"],
        ),
    ],
)
def test_steps_and_values_that_are_missing_are_named(tmp_path, settings, changes, line, expected):
    folder = write_run(tmp_path / "run", settings, **changes)
    if line is not None:
        drop_line(folder / "metrics.jsonl", line)
    assert missing(folder) == expected
