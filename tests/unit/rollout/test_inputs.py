"""Bad inputs are found before anything is loaded, each with one line that names the place."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollverify.config.load import load_config
from rollverify.data.loader import PromptLoader
from rollverify.data.templates import read_chat_template
from rollverify.engine.model_folder import read_model_folder
from rollverify.errors import ConfigError, DataError
from rollverify.rewards import exact_answer
from rollverify.rollout.inputs import encoded_batches, load_encoded, with_stop_tokens
from rollverify.toy.tokenizer import EOS_ID, save_tokenizer

USER_ERRORS = (ConfigError, DataError)
"""Both end a run with exit code 2 and one line."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder whose weights nobody reads here."""
    path = tmp_path / "model"
    save_tokenizer(path)
    config = {"vocab_size": 80, "max_position_embeddings": 64, "eos_token_id": EOS_ID}
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(b"")
    return path


def edit(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; None removes one."""
    file = folder / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def message_of(folder: Path, max_sequence_tokens: int = 64) -> str:
    """The one line of the user error that the folder gives."""
    with pytest.raises(USER_ERRORS) as caught:
        read_model_folder(folder, max_sequence_tokens)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_good_folder_is_read(folder):
    model = read_model_folder(folder, 64)
    assert (model.vocab_size, model.max_positions, model.stop_token_ids) == (80, 64, (EOS_ID,))
    ids = model.tokenizer.encode("00k\n").ids
    assert model.decode([*ids, EOS_ID]) == "00k\n"  # Special tokens do not reach the reward.


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, None),
        ({"num_experts": 0}, None),
        ({"num_experts": 8}, (5, 2, 8)),
        ({"num_local_experts": 300}, (5, 2, 300)),
    ],
)
def test_layers_and_experts_are_read_from_either_spelling(folder, changes, want):
    edit(folder, num_hidden_layers=5, num_experts_per_tok=2, **changes)
    assert read_model_folder(folder, 64).routing == want


def test_a_number_of_experts_that_is_none(folder):
    edit(folder, num_hidden_layers=5, num_experts_per_tok=2, num_experts=2.5)
    assert "num_experts must be a whole number >= 1, got 2.5" in message_of(folder)


def test_a_path_that_is_no_folder(tmp_path):
    assert "model.path" in message_of(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    expected = "*.safetensors" if name == "model.safetensors" else name
    assert f"holds no {expected}" in message_of(folder)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"{", "config.json: not valid JSON"),
        (b"\xff\xfe", "config.json: not valid JSON"),
        (b"[" * 100_000, "config.json: not valid JSON"),
        (b"[1]", "config.json: expected a JSON object, got list"),
    ],
)
def test_a_broken_config_json(folder, content, expected):
    (folder / "config.json").write_bytes(content)
    assert expected in message_of(folder)


def test_a_config_json_that_is_a_folder(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert "config.json cannot be read" in message_of(folder)


@pytest.mark.parametrize("value", [None, "80", 0, 1.5, True])
@pytest.mark.parametrize("key", ["vocab_size", "max_position_embeddings"])
def test_sizes_must_be_whole_numbers(folder, key, value):
    edit(folder, **{key: value})
    assert f"config.json: {key} must be a whole number >= 1, got {value!r}" in message_of(folder)


def test_a_tokenizer_with_ids_beyond_the_embedding(folder):
    edit(folder, vocab_size=79)
    assert "ids up to 79, the model only 79 embeddings" in message_of(folder)


def test_a_broken_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer.json cannot be read" in message_of(folder)


def test_a_context_that_is_too_short(folder):
    message = message_of(folder, max_sequence_tokens=65)
    assert "= 65 exceeds the model's context of 64 tokens" in message


def test_every_stop_id_of_every_file_counts(folder):
    """Llama 3 instruct names three; others name the one that is used in generation_config.json."""
    edit(folder, eos_token_id=[9, 7])
    (folder / "tokenizer_config.json").unlink()  # which names another one
    assert read_model_folder(folder, 64).stop_token_ids == (7, 9)
    for given, want in ((11, (7, 9, 11)), ([3, 7], (3, 7, 9)), (None, (7, 9))):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
        assert read_model_folder(folder, 64).stop_token_ids == want
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    assert read_model_folder(folder, 64).stop_token_ids == tuple(sorted({7, 9, EOS_ID}))


@pytest.mark.parametrize("stop", [80, -1, True, "7", [7, 80]])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_stop_id_that_is_none_is_named_with_its_file(folder, file, stop):
    values = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(values | {"eos_token_id": stop}))
    assert f"{file}: eos_token_id" in message_of(folder)


def test_ids_of_the_config_stop_too(folder, caplog):
    model = read_model_folder(folder, 64)
    with caplog.at_level("INFO"):
        told = with_stop_tokens(load_config(["--rollout.stop_token_ids", "[3]"]).config, model)
    assert told.stop_token_ids == tuple(sorted({3, EOS_ID}))
    assert "'<eos>' (1) or ' ' (3) or after 352 tokens; no special token" in caplog.text
    with pytest.raises(ConfigError, match="80 is not below the model's vocab_size = 80"):
        with_stop_tokens(load_config(["--rollout.stop_token_ids", "[80]"]).config, model)


def test_truncation_and_padding_of_the_file_are_switched_off(folder):
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text())
    values["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    values["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    file.write_text(json.dumps(values))
    assert len(read_model_folder(folder, 64).tokenizer.encode("00k\n").ids) == 4


@pytest.mark.parametrize("eos", ["<eos>", {"content": "<eos>"}])
@pytest.mark.parametrize("missing", [None, []])
def test_the_stop_id_may_come_from_the_tokenizer(folder, eos, missing):
    edit(folder, eos_token_id=missing)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert read_model_folder(folder, 64).stop_token_ids == (EOS_ID,)


def test_a_model_without_a_stop_id(folder):
    edit(folder, eos_token_id=None)
    (folder / "tokenizer_config.json").unlink()
    assert "add eos_token_id to config.json" in message_of(folder)


@pytest.mark.parametrize("eos", [7, ["<eos>"], {"content": 7}, True])
def test_an_eos_token_that_is_no_text(folder, eos):
    edit(folder, eos_token_id=None)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert "add eos_token_id to config.json" in message_of(folder)


@pytest.mark.parametrize("stop", [80, -1, "<eos>", True, 1.0])
def test_a_stop_id_that_the_model_cannot_produce(folder, stop):
    """With it every response would run into the length limit, without any error."""
    edit(folder, eos_token_id=stop)
    assert f"eos_token_id {stop!r} is not below vocab_size = 80" in message_of(folder)


BAD_DATA = [
    ("", "data.jsonl is empty"),
    ('{"prompt": "1", "answer": "2"}\n{"prompt": \n', "data.jsonl:2: not valid JSON"),
    ('{"prompt": "1", "answer": "2"}\n{"prompt": "1"}\n', "data.jsonl:2: key 'answer' is missing"),
    ('{"prompt": "123456789", "answer": "2"}\n', "data.jsonl:1: the prompt has 9 tokens"),
    ('{"prompt": "~", "answer": "2"}\n', "data.jsonl:1: the tokenizer cannot encode the prompt"),
    ('{"id": "q7", "prompt": "1", "answer": "a\\nb"}\n', "data.jsonl:1: prompt 'q7': answer"),
]


@pytest.mark.parametrize(("content", "expected"), BAD_DATA)
def test_bad_prompt_files_are_refused_with_their_line(folder, tmp_path, content, expected):
    file = tmp_path / "data.jsonl"
    file.write_text(content)
    with pytest.raises(USER_ERRORS) as caught:
        load_encoded(file, read_model_folder(folder, 64), 8, exact_answer)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_prompt_file(folder, tmp_path):
    with pytest.raises(USER_ERRORS, match=r"does not exist; check data\.train"):
        load_encoded(tmp_path / "none.jsonl", read_model_folder(folder, 64), 8, exact_answer)


def write_prompts(file: Path) -> None:
    rows = [{"id": f"q{i}", "prompt": f"{i}", "answer": f"{i}{i}"} for i in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_grader_scores_its_own_prompt(folder, tmp_path):
    write_prompts(tmp_path / "data.jsonl")
    model = read_model_folder(folder, 64)
    _, encoded = load_encoded(tmp_path / "data.jsonl", model, 8, exact_answer)
    responses = [[*model.tokenizer.encode(f"{i}{i}\n").ids, EOS_ID] for i in range(3)]
    scores = [[one.grade(response) for response in responses] for one in encoded]
    assert scores == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    assert [list(one.token_ids) for one in encoded] == [
        model.tokenizer.encode(str(i)).ids for i in range(3)
    ]


def test_dropped_prompts_leave_no_gap(folder, tmp_path):
    """Of lengths 1, 9 and 2 with a limit of 8 the first and the last stay, as prompts 0 and 1."""
    rows = [{"prompt": text, "answer": f"{len(text)}"} for text in ("1", "123456789", "12")]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = read_model_folder(folder, 64)
    prompts, encoded = load_encoded(file, model, 8, exact_answer, long_prompts="drop")
    assert [prompt.prompt_id for prompt in prompts] == ["1", "3"]
    assert [(len(one.token_ids), one.prompt_index) for one in encoded] == [(1, 0), (2, 1)]
    assert encoded[1].grade(model.tokenizer.encode("2\n").ids) == 1.0


def test_the_chat_template_is_part_of_the_prompt(folder, tmp_path):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{{ messages[0]['content'] }}:{% if add_generation_prompt %}<eos>{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    write_prompts(tmp_path / "data.jsonl")
    model = read_model_folder(folder, 64)
    chat = read_chat_template(folder, "")
    (prompt, *_), (encoded, *_) = load_encoded(
        tmp_path / "data.jsonl", model, 8, exact_answer, chat=chat
    )
    assert (prompt.text, prompt.bare_text) == ("0:<eos>", "0")
    assert list(encoded.token_ids) == [*model.tokenizer.encode("0:").ids, EOS_ID]


def test_batches_follow_the_loader(folder, tmp_path):
    write_prompts(tmp_path / "data.jsonl")
    prompts, encoded = load_encoded(
        tmp_path / "data.jsonl", read_model_folder(folder, 64), 8, exact_answer
    )
    loader = PromptLoader(prompts, batch_size=2, seed=0, shuffle=False)
    batches = encoded_batches(loader, prompts, encoded)
    # Batches cross the end of an epoch: 0 1 | 2 0 | 1 2.
    found = [[encoded.index(one) for one in next(batches)] for _ in range(3)]
    assert found == [[0, 1], [2, 0], [1, 2]]
