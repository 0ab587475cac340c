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


@pytest.mark.parametrize("name", ["metrics.jsonl", "cuts.jsonl", "slots.jsonl"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert f"{name} is missing" in missing(folder)


def test_only_what_is_verified_has_cuts(tmp_path):
    folder = write_run(tmp_path / "run", {"method.name": "on_policy"})
    (folder / "cuts.jsonl").unlink()
    assert missing(folder) == []


@pytest.mark.parametrize("text", [None, '{"run"'])
def test_a_missing_or_damaged_config_is_named(folder, text):
    (folder / "config.json").unlink()
    if text:
        (folder / "config.json").write_text(text)
    assert "config.json is missing or damaged" in missing(folder)


def test_steps_that_are_not_logged_are_named(tmp_path):
    folder = write_run(tmp_path / "run", {"training.steps": 9}, num_steps=6, has_final=False)
    drop_line(folder / "metrics.jsonl", 3)
    found = missing(folder)
    assert "steps 3, 7-9 of 9 not logged" in found
    assert "the final evaluation, after step 9, is missing" in found


def test_a_missing_evaluation_of_the_base_model_is_named(folder):
    drop_line(folder / "metrics.jsonl", 0)
    assert missing(folder) == ["the evaluation of the base model is missing"]


def test_a_run_without_evaluation_says_so(tmp_path):
    folder = write_run(tmp_path / "run", {"evaluation.enable": False}, has_final=False)
    assert missing(folder) == ["evaluation is off, so there is no accuracy"]


def test_values_that_were_not_finite_are_named(tmp_path):
    folder = write_run(tmp_path / "run", train__entropy_nats=None)
    assert missing(folder) == ["train/entropy_nats is missing or not finite in steps 1-3"]


def test_a_damaged_line_is_named(folder):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    assert missing(folder) == ["line 5 of metrics.jsonl is damaged"]
