"""Rows of JSON lines, JSON lists and Parquet files, and one line for each bad file."""

import json
import sys

import pyarrow
import pytest
from pyarrow import parquet

from rollverify.data.row_files import read_rows, top_columns
from rollverify.errors import DataError

ROWS = [{"problem": "1 + 1", "answer": "2"}, {"problem": "1 + 2", "answer": "3"}]


def write_table(path, rows):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def seen(path, columns=("problem", "answer")):
    return [(row.place, row.number, row.values) for row in read_rows(path, columns)]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.txt"])
def test_lines_are_read_whatever_the_ending(tmp_path, name):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert seen(path) == [(f"{path}:1", 1, ROWS[0]), (f"{path}:2", 2, ROWS[1])]


def test_the_ending_may_be_in_capitals(tmp_path):
    path = write_table(tmp_path / "A.PARQUET", ROWS)
    assert seen(path) == [(f"{path}, row 1", 1, ROWS[0]), (f"{path}, row 2", 2, ROWS[1])]


def test_a_json_list_is_read_as_rows(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("\ufeff\n" + json.dumps(ROWS, indent=1))
    assert seen(path) == [(f"{path}, row 1", 1, ROWS[0]), (f"{path}, row 2", 2, ROWS[1])]


def test_parquet_gives_the_columns_that_are_asked_for(tmp_path):
    rows = [{**row, "solution": "long"} for row in ROWS]
    path = write_table(tmp_path / "a.parquet", rows)
    assert seen(path) == [(f"{path}, row 1", 1, ROWS[0]), (f"{path}, row 2", 2, ROWS[1])]
    (first, _) = read_rows(path, ["problem"])
    assert list(first.columns) == ["problem", "answer", "solution"]


def test_nested_parquet_columns_become_dicts_and_lists(tmp_path):
    row = {"prompt": [{"role": "user", "content": "x"}], "extra": {"index": 7, "more": 1}}
    path = write_table(tmp_path / "a.parquet", [row])
    assert seen(path, ["prompt", "extra.index"]) == [(f"{path}, row 1", 1, row)]


def test_parquet_of_several_batches_counts_on(tmp_path):
    path = write_table(tmp_path / "a.parquet", [{"n": n} for n in range(1500)])  # batches of 1024
    assert [(row.number, row.values["n"]) for row in read_rows(path, ["n"])] == [
        (n + 1, n) for n in range(1500)
    ]


def test_a_dotted_column_is_taken_whole_before_it_is_split():
    assert top_columns(["a.b", "c.d", "e"], ["a.b", "a", "c", "f"]) == ["a.b", "c"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"[\n{}, \n{]", r"a\.json:3: not valid JSON \(.*column 2\)"),
        ("a.json", b"[" * 100_000, r"a\.json: JSON too large"),
        ("a.json", b'[{}, "x"]', r"a\.json, row 2: expected a JSON object, got str"),
        ("a.json", b'[{"a": "\xff"}]', r"a\.json is not UTF-8 text \(byte 8\)"),
        ("a.jsonl", b'{}\n{"a": "\xff"}', r"a\.jsonl is not UTF-8 text \(byte 10\)"),
        ("a.jsonl", b"{}\n\n\n{}", r"a\.jsonl:2: blank line; remove it"),
        ("a.parquet", b"PAR1 no more", r"a\.parquet: not readable as Parquet after 0 rows"),
        ("a.parquet", b"", r"a\.parquet: not readable as Parquet after 0 rows"),
    ],
)
def test_a_broken_file_gives_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        seen(path)
    assert "\n" not in str(caught.value)


def test_text_that_a_flipped_bit_made_no_text_gives_one_line(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"problem": ["zebra"]}), path, compression="none")
    path.write_bytes(path.read_bytes().replace(b"zebra", b"zebr\xff"))
    with pytest.raises(DataError, match=r"a\.parquet: not readable as Parquet .*can't decode"):
        seen(path)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.parquet"])
def test_a_missing_file_is_named(tmp_path, name):
    with pytest.raises(DataError, match=rf"{name} does not exist; check data\.train and data\.te"):
        seen(tmp_path / name)


def test_parquet_without_its_library_says_what_to_install(tmp_path, monkeypatch):
    path = write_table(tmp_path / "a.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # an import of it now fails
    with pytest.raises(DataError, match=r"needs pyarrow.*pip install 'rollverify\[data\]'"):
        seen(path)
