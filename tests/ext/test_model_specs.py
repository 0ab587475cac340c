"""Model specs from config.json: what is built, and the one-line errors of bad folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_config

from torchtitan_ext.model_specs import ModelFolderError, model_spec_from_hf, read_hf_config


def folder_with(tmp_path: Path, text: str) -> Path:
    (tmp_path / "config.json").write_text(text)
    return tmp_path


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in tiny_config().items() if name != key}


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
BAD_CONFIGS = [
    (without("hidden_size"), "lacks hidden_size"),
    (without("head_dim"), "lacks head_dim"),
    (without("model_type"), "model_type 'None' is not supported; supported: qwen3"),
    (without("rope_parameters"), "no rope_theta"),
    (tiny_config(model_type="llama"), "model_type 'llama' is not supported"),
    (tiny_config(hidden_size="48"), "hidden_size must be a number, got '48'"),
    (tiny_config(rms_norm_eps=None), "rms_norm_eps must be a number, got None"),
    (tiny_config(num_key_value_heads=3), "4 is not a multiple of num_key_value_heads 3"),
    (tiny_config(attention_bias=True), "attention bias"),
    (tiny_config(use_sliding_window=True), "sliding windows"),
    (tiny_config(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    (tiny_config(rope_parameters=YARN), "rope type 'yarn' is not supported"),
]


@pytest.mark.parametrize(
    ("config", "message"), BAD_CONFIGS, ids=lambda v: v if type(v) is str else ""
)
def test_bad_config_gives_one_line_that_names_the_folder(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFolderError) as caught:
        model_spec_from_hf(folder_with(tmp_path, json.dumps(config)))
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not valid JSON"), ("[1]", "must hold a JSON object, got list"), ("", "not valid JSON")],
)
def test_broken_file_gives_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ModelFolderError, match=message) as caught:
        read_hf_config(folder_with(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_missing_folder_and_missing_file_differ(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="does not exist"):
        read_hf_config(tmp_path / "nowhere")
    with pytest.raises(ModelFolderError, match=r"has no config\.json"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_spec_has_the_sizes_of_the_config(tmp_path: Path, tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied)
    spec = model_spec_from_hf(folder_with(tmp_path, json.dumps(config)))
    with torch.device("meta"):
        model = spec.model.build()
    # embedding 101*48; layer: q and o 2*48*128, k and v 2*48*64, mlp 3*48*80, norms 2*48+2*32
    layer = 2 * 48 * 128 + 2 * 48 * 64 + 3 * 48 * 80 + 2 * 48 + 2 * 32
    heads = 1 if tied else 2
    assert sum(p.numel() for p in model.parameters()) == heads * 101 * 48 + 2 * layer + 48


def test_old_spelling_of_rope_theta_is_read(tmp_path: Path) -> None:
    config = without("rope_parameters") | {"rope_theta": 5e5}
    spec = model_spec_from_hf(folder_with(tmp_path, json.dumps(config)))
    assert spec.model.layers[0].attention.rope.theta == 5e5
