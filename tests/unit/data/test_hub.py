"""Datasets of the hub: announced before they are asked for, one line if they cannot be had."""

import logging
import sys

import pytest

from rollverify.data.hub import HubDataset, read_hub_rows
from rollverify.errors import DataError

GSM8K = HubDataset(name="openai/gsm8k", subset="main", split="test", revision="abc")
LOCAL = "data.train = 'gsm8k:FILE'"


class FakeTable:
    """A table of the hub's library, as far as it is used."""

    def __init__(self, rows):
        self.rows = rows
        self.column_names = list(rows[0])

    def select_columns(self, names):
        return FakeTable([{name: row[name] for name in names} for row in self.rows])

    def __iter__(self):
        return iter(self.rows)


def test_rows_come_with_their_place_and_the_columns_asked_for(caplog):
    caplog.set_level(logging.INFO, logger="rollverify")
    asked = []

    def load(name, subset, *, split, revision):
        asked.append((name, subset, split, revision, len(caplog.records)))
        return FakeTable([{"question": "1 + 1", "answer": "2", "more": 1}])

    (row,) = read_hub_rows(GSM8K, ["question", "answer"], local_form=LOCAL, load=load)
    # It was announced, with the way to stay offline, before it was asked for.
    assert asked == [("openai/gsm8k", "main", "test", "abc", 1)]
    (message,) = (record.getMessage() for record in caplog.records)
    assert "openai/gsm8k (subset main, split test, revision abc)" in message and LOCAL in message
    assert row.place == "openai/gsm8k (subset main, split test, revision abc), row 1"
    assert row.values == {"question": "1 + 1", "answer": "2"}
    assert row.columns == ["question", "answer", "more"]


def test_what_is_not_set_is_left_to_the_hub():
    def load(*where, **how):
        assert (where, how) == (("a/b", None), {"split": "train", "revision": None})
        return FakeTable([{"prompt": "x"}])

    assert len(list(read_hub_rows(HubDataset(name="a/b"), [], local_form="x", load=load))) == 1


def test_a_dataset_that_cannot_be_had_is_one_line_with_the_local_form():
    def load(*_, **__):
        raise ConnectionError("no route\nto host")

    with pytest.raises(DataError) as caught:
        list(read_hub_rows(GSM8K, [], local_form=LOCAL, load=load))
    message = str(caught.value)
    assert "cannot get the dataset openai/gsm8k" in message and "\n" not in message
    assert "ConnectionError: no route" in message and message.endswith(LOCAL)


def test_without_the_library_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # an import of it now fails
    with pytest.raises(DataError, match=r"pip install 'rollverify\[data\]', or set data\.train"):
        list(read_hub_rows(GSM8K, [], local_form=LOCAL))
