"""Records: written and read back, gone on from after a kill, never mixed with others."""

import contextlib
from pathlib import Path

import pytest
from unit.evaluation.examples import problem

from rollverify.errors import ConfigError
from rollverify.evaluation.records import RECORDS_FILE, Identity, RecordFile, read_records

IDENTITY: Identity = {"model": "abc", "temperature": 1.0}


def write(folder: Path, *indices: int) -> Path:
    """Add problems with these indices."""
    with contextlib.closing(RecordFile(folder, IDENTITY)) as records:
        for index in indices:
            records.append(problem(index, "a", ["a", None]))
    return folder / RECORDS_FILE


def test_records_are_read_as_they_were_written(tmp_path):
    identity, records = read_records(write(tmp_path / "new", 1, 0))
    assert identity == IDENTITY
    assert list(records.values()) == [problem(0, "a", ["a", None]), problem(1, "a", ["a", None])]


def test_a_record_is_in_the_file_before_the_next_begins(tmp_path):
    with contextlib.closing(RecordFile(tmp_path, IDENTITY)) as records:
        records.append(problem(4, "a", ["b"]))
        assert list(read_records(records.path)[1]) == [4]


def test_an_interrupted_file_goes_on_without_its_torn_line(tmp_path):
    file = write(tmp_path, 0, 1)
    whole = file.read_text()
    file.write_text(whole[:-20])
    with contextlib.closing(RecordFile(tmp_path, IDENTITY)) as records:
        assert list(records.done) == [0]
        records.append(problem(1, "a", ["a", None]))
    assert file.read_text() == whole


def test_a_damaged_line_costs_its_problem_only(tmp_path, caplog):
    file = write(tmp_path, 0, 1, 2)
    lines = file.read_text().splitlines()
    lines[2] = lines[2].replace('"sampled"', '"other"')
    file.write_text("\n".join(lines) + "\n")
    assert list(read_records(file)[1]) == [0, 2]
    assert f"{file}:3: dropping a damaged line" in caplog.text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"index": 1,', '"index": 1e999,'),
        ('"index": 1,', '"index": "1",'),
        ('"index": 1,', '"index": -1,'),
        ('"problem_id": "p1"', '"problem_id": 1'),
        ('"reward": 1.0', '"reward": null'),
        ('"num_tokens": 10', '"num_tokens": "10"'),
        ('"answer": "a"', '"answer": 3'),
        ('"sampled": [', '"sampled": 3, "x": ['),
    ],
)
def test_a_line_with_a_value_of_another_kind_is_damaged(tmp_path, old, new):
    file = write(tmp_path, 0, 1, 2)
    lines = file.read_text().splitlines()
    assert old in lines[2]
    lines[2] = lines[2].replace(old, new)
    file.write_text("\n".join(lines) + "\n")
    assert list(read_records(file)[1]) == [0, 2]


def test_a_record_with_another_number_of_samples_is_damaged(tmp_path):
    identity: Identity = {"samples_per_problem": 2}
    with contextlib.closing(RecordFile(tmp_path, identity)) as records:
        records.append(problem(0, "a", ["a", None]))
        records.append(problem(1, "a", ["a"]))
    assert list(read_records(records.path)[1]) == [0]


def test_a_record_of_no_problem_of_the_set_is_dropped(tmp_path, caplog):
    write(tmp_path, 0, 1, 2)
    ids = ["p0", "another"]  # Problem 1 has another name, and there is no third.
    with contextlib.closing(RecordFile(tmp_path, IDENTITY, ids)) as records:
        assert list(records.done) == [0]
    assert "dropping the records of problems 1, 2" in caplog.text


def test_a_file_without_its_first_line_begins_again(tmp_path, caplog):
    file = write(tmp_path, 0)
    file.write_text("\n".join(file.read_text().splitlines()[1:]))
    assert list(read_records(write(tmp_path, 3))[1]) == [3]
    assert "does not begin with what was evaluated" in caplog.text


def test_another_evaluation_is_not_mixed_in(tmp_path):
    file = write(tmp_path, 0)
    before = file.read_bytes()
    with pytest.raises(ConfigError) as caught:
        RecordFile(tmp_path, {**IDENTITY, "temperature": 0.7})
    assert "temperature: 1.0 there, 0.7 now); set evaluation.output" in str(caught.value)
    assert "\n" not in str(caught.value) and file.read_bytes() == before


def test_two_evaluations_do_not_write_one_file(tmp_path):
    with (
        contextlib.closing(RecordFile(tmp_path, IDENTITY)),
        pytest.raises(ConfigError, match="another evaluation is writing to"),
    ):
        RecordFile(tmp_path, IDENTITY)
    write(tmp_path, 0)  # Free again.


def test_a_refused_file_is_free_for_the_next(tmp_path):
    write(tmp_path, 0)
    with pytest.raises(ConfigError) as caught:  # It keeps the refused object alive.
        RecordFile(tmp_path, {"model": "other"})
    assert list(read_records(write(tmp_path, 1))[1]) == [0, 1]
    assert "holds another evaluation" in str(caught.value)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"evaluation\.output: .*file/sub cannot be written"):
        RecordFile(tmp_path / "file" / "sub", IDENTITY)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.jsonl cannot be read"):
        read_records(tmp_path / "none.jsonl")
