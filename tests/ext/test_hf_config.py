"""Broken values in a config.json: one line that names file, key, value and cure, in every spec."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import tiny_config, tiny_llama_config, tiny_moe_config

from rollverify.dry_run.check import main
from torchtitan_ext.models.hf_config import ModelFolderError, read_hf_config
from torchtitan_ext.models.specs import model_spec_from_hf

MAKERS = {"qwen3": tiny_config, "qwen3_moe": tiny_moe_config, "llama": tiny_llama_config}
SIZES = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
]
EXPERT_SIZES = [
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "decoder_sparse_step",
]
NO_SIZE = [-1, 0, 36.0, 2.5, 1e30, 10**30, True, False, "48", "", [48], {}, float("nan")]
NO_POSITIVE = [-1e-6, 0, 0.0, float("inf"), float("nan"), 10**400, True, "1e-6", [], None]


def refusal(folder: Path, config: dict[str, Any]) -> str:
    """What is said of the config; it must be one line, of bearable length, and name the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFolderError) as caught:
        model_spec_from_hf(folder)
    message = str(caught.value)
    assert str(folder) in message and "config.json" in message
    assert "\n" not in message and len(message) < 300 + len(str(folder))
    return message


@pytest.mark.parametrize("model_type", MAKERS)
@pytest.mark.parametrize("key", SIZES)
def test_a_size_is_a_whole_number_in_every_spec(tmp_path: Path, key: str, model_type: str) -> None:
    for value in NO_SIZE:
        message = refusal(tmp_path, MAKERS[model_type](**{key: value}))
        assert f"{key} must be a whole number from 1 to" in message, value
        assert repr(value)[:20] in message, value
        assert ("write 36" if value == 36.0 else "came with") in message, value


@pytest.mark.parametrize("key", EXPERT_SIZES)
def test_a_size_of_experts_is_a_whole_number(tmp_path: Path, key: str) -> None:
    for value in [*NO_SIZE, None]:
        message = refusal(tmp_path, tiny_moe_config(**{key: value}))
        assert f"{key} must be a whole number from 1 to" in message, value
        assert repr(value)[:20] in message, value


def test_null_is_no_size_but_where_llama_may_leave_it_out(tmp_path: Path) -> None:
    for model_type, make in MAKERS.items():
        for key in SIZES:
            if model_type != "llama" or key not in ("head_dim", "num_key_value_heads"):
                assert f"{key} must be" in refusal(tmp_path, make(**{key: None}))


def test_a_float_is_refused_with_the_whole_number_to_write(tmp_path: Path) -> None:
    """transformers, and with it the engine, refuses 48.0, too."""
    assert "got 48.0; write 48" in refusal(tmp_path, tiny_config(hidden_size=48.0))
    assert "; write" not in refusal(tmp_path, tiny_config(hidden_size=48.5))


@pytest.mark.parametrize("model_type", MAKERS)
@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
def test_a_real_number_is_finite_and_above_zero(tmp_path: Path, key: str, model_type: str) -> None:
    for value in NO_POSITIVE:
        changes = {key: value, "rope_parameters": None} if key == "rope_theta" else {key: value}
        message = refusal(tmp_path, MAKERS[model_type](**changes))
        assert f"{key} must be a finite number above 0" in message, value
        assert repr(value)[:20] in message and "came with" in message, value


@pytest.mark.parametrize("value", [-0.1, "0.02", None, True, float("inf")])
def test_the_spread_of_initial_weights_is_a_number(tmp_path: Path, value: object) -> None:
    assert "initializer_range must be" in refusal(tmp_path, tiny_config(initializer_range=value))


@pytest.mark.parametrize("value", ["default", "", 1, ["default"], False])
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_rope_settings_are_an_object(tmp_path: Path, key: str, value: object) -> None:
    for make in MAKERS.values():
        config = make(rope_parameters=None, rope_theta=1e4) | {key: value}
        assert f"{key} must be an object, got {value!r}" in refusal(tmp_path, config)


ODD = [
    (tiny_config(rope_parameters={"rope_theta": 0}), "rope_theta must be a finite number above 0"),
    (tiny_config(head_dim=31), "head_dim must be even, got 31"),
    (tiny_config(rope_parameters={"rope_type": ["x\ny"]}), "rope type ['x\\ny'] is not supported"),
    (tiny_config(rope_parameters={"full_attention": {}}), "by layer ('full_attention')"),
    (tiny_config(model_type=["qwen3"]), "model_type ['qwen3'] is not supported"),
    (tiny_config(model_type={}), "model_type {} is not supported"),
    (tiny_config(hidden_act=["silu"]), "hidden_act ['silu'] is not supported"),
    (tiny_config(tie_word_embeddings="false"), "tie_word_embeddings must be true or false"),
    (tiny_moe_config(num_local_experts=[8]), "num_local_experts must be a whole number"),
    (tiny_moe_config(mlp_only_layers="0"), "mlp_only_layers must be a list"),
    (tiny_llama_config(hidden_size=50), "hidden_size 50 is not a multiple of num_attention_heads"),
    (tiny_llama_config(head_dim=None, num_attention_heads=0), "num_attention_heads must be"),
    (tiny_llama_config(head_dim=None, hidden_size=-48), "hidden_size must be a whole number"),
    (tiny_llama_config(head_dim=None, num_attention_heads=16), "head_dim must be even, got 3"),
]


@pytest.mark.parametrize(("config", "message"), ODD, ids=lambda v: v if type(v) is str else "")
def test_what_cannot_be_computed_is_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    assert message in refusal(tmp_path, config)


def test_a_scaling_that_would_divide_by_zero_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 4.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    message = refusal(tmp_path, tiny_llama_config(rope_parameters=rope))
    assert "high_freq_factor 4.0 must be above low_freq_factor 4.0" in message


@pytest.mark.parametrize("rope", [{}, {"rope_parameters": None}, {"rope_scaling": None}])
def test_llama_without_rope_theta_has_that_of_transformers(
    tmp_path: Path, rope: dict[str, Any]
) -> None:
    """Folders of Llama 2 leave it out."""
    from transformers import LlamaConfig

    config = {k: v for k, v in tiny_llama_config().items() if k != "rope_parameters"} | rope
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs: Any = LlamaConfig.from_pretrained(tmp_path)
    ours: Any = model_spec_from_hf(tmp_path).model
    assert theirs.rope_parameters["rope_theta"] == 10000.0
    assert ours.layers[0].attention.rope.theta == 10000.0


def test_a_file_that_cannot_be_read_gives_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelFolderError, match="not valid JSON"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelFolderError, match="cannot be read"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"), [("num_hidden_layers", 0), ("num_attention_heads", 0), ("vocab_size", 1e30)]
)
def test_the_dry_run_names_file_key_and_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: float
) -> None:
    file = tmp_path / "sizes.json"
    file.write_text(json.dumps(tiny_config(**{key: value})))
    assert main(["--model-config", str(file)]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith(f"error: --model-config: '{file}': {key} must") and error.count("\n") == 1
    )
    assert f"got {value!r}" in error


@pytest.mark.parametrize("make", MAKERS.values())
def test_the_largest_sizes_still_have_a_number_of_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any
) -> None:
    """What is larger is refused, so nothing between here and torch overflows."""
    width = {"hidden_size": 2**19, "intermediate_size": 2**19, "head_dim": 2**19}
    width |= {"num_attention_heads": 2**19, "num_key_value_heads": 2**19, "num_hidden_layers": 1}
    if make is tiny_moe_config:
        width |= {"moe_intermediate_size": 2**19, "num_experts": 10_000, "mlp_only_layers": []}
    longest = {"vocab_size": 2**31 - 1, "max_position_embeddings": 2**31 - 1}
    (tmp_path / "config.json").write_text(json.dumps(make(**width, **longest)))
    assert main(["--model-config", str(tmp_path / "config.json"), "--gpu-gib", "80"]) == 2
    assert "do not fit into 80.0 GiB" in capsys.readouterr().err
