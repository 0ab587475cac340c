"""What the text of `data.train` and `data.test` stands for."""

from pathlib import Path

import pytest

from rollverify.data.presets import PRESETS
from rollverify.data.rows import HubDataset
from rollverify.data.sources import SourceOptions, resolve_source
from rollverify.data.templates import TEMPLATES
from rollverify.errors import ConfigError


def resolve(text, use="train", **options):
    found = SourceOptions(**options)
    return resolve_source(text, use=use, setting=f"data.{use}", options=found)


@pytest.mark.parametrize("text", ["a/b.jsonl", "b.json", "x/y.parquet", "./b", "../b", "/b/c"])
def test_endings_and_leading_dots_make_a_file(text):
    source = resolve(text)
    assert source.location == Path(text)
    assert (source.template, source.answer_format) == ("{prompt}", "text")
    assert (source.columns.prompt, source.columns.requires_id) == (("prompt",), False)


def test_a_file_without_ending_is_one_if_it_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve("set/train").location == HubDataset(name="set/train")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train").write_text("")
    assert resolve("set/train").location == Path("set/train")


def test_a_colon_may_be_part_of_a_files_name(tmp_path):
    (tmp_path / "a:b.jsonl").write_text("")
    assert resolve(str(tmp_path / "a:b.jsonl")).location == tmp_path / "a:b.jsonl"


@pytest.mark.parametrize(("use", "split"), [("train", "train"), ("test", "test")])
def test_owner_and_name_make_a_dataset_of_the_hub(use, split):
    assert resolve("own-er/na.me", use).location == HubDataset(name="own-er/na.me", split=split)
    hub = {"subset": "main", "split": "dev", "revision": "v1"}
    assert resolve("a/b", use, hub=hub).location == HubDataset(name="a/b", **hub)


def test_a_preset_alone_is_its_dataset_and_with_a_place_that_place():
    assert resolve("gsm8k", "test").location == HubDataset(
        name="openai/gsm8k", subset="main", split="test"
    )
    assert resolve("gsm8k:my/train.jsonl").location == Path("my/train.jsonl")
    assert resolve("gsm8k:me/copy", "test").location == HubDataset(name="me/copy", split="test")
    pinned = resolve("gsm8k", hub={"revision": "abc"}).location
    assert pinned == HubDataset(name="openai/gsm8k", subset="main", revision="abc")


def test_a_place_is_read_by_the_rules_of_the_preset():
    source = resolve("gsm8k:train.jsonl")
    assert (source.columns.prompt, source.answer_format) == (("question",), "hashes")
    assert source.template == TEMPLATES["boxed"]
    assert source.local_form == "data.train = 'gsm8k:FILE'"


def test_settings_win_over_the_preset():
    source = resolve(
        "dapo_math_17k:a.jsonl",
        columns={"prompt": "text", "id": "uid"},
        answer_format="text",
        template="Q: {prompt}",
        duplicates="keep",
    )
    columns = source.columns
    assert (columns.prompt, columns.id, columns.requires_id) == (("text",), ("uid",), True)
    assert columns.answer == ("reward_model.ground_truth",)
    assert (source.answer_format, source.template) == ("text", "Q: {prompt}")
    assert not source.drop_duplicates and resolve("dapo_math_17k").drop_duplicates
    assert resolve("a.jsonl", duplicates="drop").drop_duplicates
    assert resolve("gsm8k", template="none").template == "{prompt}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gsm_8k", "did you mean 'gsm8k'?"),
        ("GSM8K", "did you mean 'gsm8k'?"),
        ("nothing like it", ", ".join(PRESETS)),
        ("gsm8k:", "data.test = 'gsm8k:': '' is neither a file"),
        ("gsm8k:own", "data.test = 'gsm8k:own': 'own' is neither a file"),
        ("gsm8k:math500", "'math500' is a preset, but a file or 'owner/name' must follow 'gsm8k:'"),
        ("gms8k:none.jsonl", "did you mean 'gsm8k'?"),
        ("https://a.b/c.jsonl", "data.test = 'https://a.b/c.jsonl' is neither a file"),
        ("a/b/c", "nor a dataset 'owner/name'"),
        ("x" * 5000, "data.test = 'xxx"),
        ("a\0b", "data.test = 'a\\x00b' is neither a file"),
        ("a\0b.jsonl", "data.test = 'a\\x00b.jsonl' is neither a file"),
        ("~nobody-of-this-name/a.jsonl", "has no home folder"),
    ],
)
def test_unknown_texts_are_refused_with_what_is_known(text, message):
    with pytest.raises(ConfigError) as caught:
        resolve(text, "test")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_settings_of_the_hub_do_not_go_with_a_file():
    with pytest.raises(ConfigError, match=r"data\.train_hub is set but data\.train = 'a\.jsonl'"):
        resolve("a.jsonl", hub={"split": "train"})
