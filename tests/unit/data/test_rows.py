"""Rows of JSON lines, JSON lists, Parquet files and datasets of the hub; one line for a bad one."""

import json
import logging

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from rollverify.data.rows import HubDataset, read_hub_rows, read_rows
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


IMAGES = {"image": {"bytes": b"PNG", "path": "a.png"}, "all": [{"bytes": b"PNG"}], "raw": b"x"}
"""Columns that hold bytes, somewhere."""


def test_parquet_gives_all_columns_but_bytes_that_nobody_needs(tmp_path):
    rows = [{**row, "solution": ["long"], **IMAGES} for row in ROWS]
    path = write_table(tmp_path / "a.parquet", rows)
    read = [{**row, "solution": ["long"]} for row in ROWS]
    assert seen(path) == [(f"{path}, row 1", 1, read[0]), (f"{path}, row 2", 2, read[1])]
    (first, _) = read_rows(path, ["problem", "raw", "image.path"])
    assert first.values == read[0] | {"image": IMAGES["image"], "raw": b"x"}


def test_nested_parquet_columns_become_dicts_and_lists(tmp_path):
    row = {"prompt": [{"role": "user", "content": "x"}], "extra": {"index": 7, "more": 1}}
    path = write_table(tmp_path / "a.parquet", [row])
    assert seen(path, ["prompt", "extra.index"]) == [(f"{path}, row 1", 1, row)]


def test_parquet_of_several_batches_counts_on(tmp_path):
    path = write_table(tmp_path / "a.parquet", [{"n": n} for n in range(1500)])  # batches of 1024
    assert [(row.number, row.values["n"]) for row in read_rows(path, ["n"])] == [
        (n + 1, n) for n in range(1500)
    ]


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


GSM8K = HubDataset(name="openai/gsm8k", subset="main", split="test", revision="abc")
LOCAL = "data.train = 'gsm8k:FILE'"


@pytest.fixture
def hub(monkeypatch):
    """What the hub is asked for; it answers with the table, or raises the error, put in."""

    class Hub:
        answer = None
        asked = None

        def load(self, name, subset, *, split, revision):
            self.asked = (name, subset, split, revision)
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    made = Hub()
    monkeypatch.setattr(datasets, "load_dataset", made.load)
    return made


def test_rows_of_the_hub_come_with_their_place_and_all_columns(hub, caplog):
    caplog.set_level(logging.INFO, logger="rollverify")
    hub.answer = datasets.Dataset.from_list([{"question": "1 + 1", "more": {"a": [1]}, "x": None}])
    rows = read_hub_rows(GSM8K, ["question", "answer"], local_form=LOCAL)
    assert hub.asked is None
    (row,) = rows
    assert hub.asked == ("openai/gsm8k", "main", "test", "abc")
    (message,) = (record.getMessage() for record in caplog.records)
    assert "openai/gsm8k (subset main, split test, revision abc)" in message and LOCAL in message
    assert row.place == "openai/gsm8k (subset main, split test, revision abc), row 1"
    assert row.values == {"question": "1 + 1", "more": {"a": [1]}, "x": None}


def test_the_hub_is_announced_before_it_is_asked(hub, caplog):
    caplog.set_level(logging.INFO, logger="rollverify")
    hub.answer = ValueError("no")
    with pytest.raises(DataError):
        list(read_hub_rows(GSM8K, local_form=LOCAL))
    assert len(caplog.records) == 1


def test_what_is_not_set_is_left_to_the_hub(hub):
    hub.answer = datasets.Dataset.from_list([{"prompt": "x"}])
    assert len(list(read_hub_rows(HubDataset(name="a/b"), local_form="x"))) == 1
    assert hub.asked == ("a/b", None, "train", None)


def test_many_rows_of_the_hub_are_those_of_the_table(hub):
    features = datasets.Features(
        {"n": datasets.Value("int32"), "pairs": [{"a": datasets.Value("string")}]}
    )
    made = [{"n": n, "pairs": [{"a": str(n)}] * (n % 3)} for n in range(1500)]  # batches of 1024
    hub.answer = datasets.Dataset.from_list(made, features=features)
    rows = list(read_hub_rows(HubDataset(name="a/b"), local_form="x"))
    assert [row.number for row in rows] == list(range(1, 1501))
    assert [row.values for row in rows] == made


def test_images_of_the_hub_are_not_decoded(hub):
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    broken = {"prompt": "x", "image": {"bytes": b"no image", "path": None}}
    hub.answer = datasets.Dataset.from_list([broken], features=features)
    (row,) = read_hub_rows(HubDataset(name="a/b"), ["prompt"], local_form="x")
    assert row.values == {"prompt": "x"}


def test_a_dataset_that_cannot_be_had_is_one_line_with_the_local_form(hub):
    hub.answer = ConnectionError("no route\nto host")
    with pytest.raises(DataError) as caught:
        list(read_hub_rows(GSM8K, local_form=LOCAL))
    message = str(caught.value)
    assert "cannot get the dataset openai/gsm8k" in message and "\n" not in message
    assert "ConnectionError: no route" in message and message.endswith(LOCAL)
