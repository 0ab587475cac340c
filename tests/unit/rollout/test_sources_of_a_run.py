"""The prompts a config names: the prepared ones without any, else what `data.*` says."""

import json

import pytest

from rollverify.config.tables import Config, DataConfig, EvaluationConfig, PrepareConfig
from rollverify.engine.model_folder import read_model_folder
from rollverify.errors import DataError
from rollverify.rollout.inputs import load_inputs, make_run_reward, prompt_source
from rollverify.toy.settings import base_folder
from rollverify.toy.tokenizer import EOS_ID, save_tokenizer


@pytest.fixture
def model(tmp_path):
    """A model of the task's tokenizer whose weights nobody reads here."""
    path = tmp_path / "model"
    save_tokenizer(path)
    config = {"vocab_size": 80, "max_position_embeddings": 64, "eos_token_id": EOS_ID}
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(b"")
    return read_model_folder(path, 64)


def write(path, key, num_rows):
    rows = [{key: f"{number}", "answer": f"a{number}"} for number in range(num_rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def inputs(config, model):
    """(training prompts, encoded ones, test prompts)."""
    return load_inputs(config, model, make_run_reward(config))


def test_without_data_the_prepared_problems_are_taken(tmp_path, model):
    config = Config(prepare=PrepareConfig(cache_dir=str(tmp_path / "base")))
    write(base_folder(config.prepare) / "train.jsonl", "prompt", 3)
    write(base_folder(config.prepare) / "test.jsonl", "prompt", 2)
    prompts, encoded, test = inputs(config, model)
    assert [prompt.text for prompt in prompts] == ["0", "1", "2"]
    assert len(encoded) == 3 and len(test) == 2


def test_train_and_test_have_settings_of_their_own(tmp_path, model):
    data = DataConfig(
        train=write(tmp_path / "a.jsonl", "question", 3),
        train_columns={"prompt": "question"},
        test=write(tmp_path / "b.jsonl", "problem", 5),
        test_columns={"prompt": "problem"},
        template="Q {prompt}",
    )
    config = Config(data=data, evaluation=EvaluationConfig(num_problems=4))
    prompts, _, test = inputs(config, model)
    assert [prompt.text for prompt in prompts] == ["Q 0", "Q 1", "Q 2"]
    assert [model.decode(one.token_ids) for one in test] == ["Q 0", "Q 1", "Q 2", "Q 3"]


def test_a_wrong_column_names_the_setting_of_its_use(tmp_path, model):
    file = write(tmp_path / "b.jsonl", "problem", 1)
    train = write(tmp_path / "a.jsonl", "prompt", 1)
    with pytest.raises(DataError, match=r"b\.jsonl:1: key 'prompt' .* in data\.test_columns"):
        inputs(Config(data=DataConfig(train=train, test=file)), model)


def test_no_test_set_is_read_without_evaluation(tmp_path, model):
    data = DataConfig(train=write(tmp_path / "a.jsonl", "prompt", 1), test="no.jsonl")
    config = Config(data=data, evaluation=EvaluationConfig(enable=False))
    assert inputs(config, model)[2] == []


def test_every_setting_reaches_the_source():
    data = DataConfig(
        train="me/set",
        test="me/set",
        train_hub={"split": "a", "revision": "v1"},
        test_hub={"subset": "c"},
        answer_format="integer",
        duplicates="drop",
    )
    train, test = (prompt_source(Config(data=data), use) for use in ("train", "test"))
    assert str(train.location) == "me/set (split a, revision v1)"
    assert str(test.location) == "me/set (subset c, split test)"
    assert (train.answer_format, train.drop_duplicates) == ("integer", True)
