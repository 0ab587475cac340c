"""Reads a Hugging Face `config.json` and refuses what would be computed other than it says.

Knows the keys of Llama and of dense and mixture-of-experts Qwen3; builds nothing, reads no weights.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
)
_LLAMA3_ROPE = {
    "factor": "scaling_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}
"""Keys of a llama3 scaling in config.json, and torchtitan's names for them."""


class ModelFolderError(ValueError):
    """A model folder that is missing, incomplete or of an architecture without a spec."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSettings:
    """The mixture-of-experts part of a config.json."""

    num_experts: int
    """Experts per layer."""

    top_k: int
    """Experts that compute one token."""

    hidden_dim: int
    """Inner width of one expert."""

    norm_topk: bool
    """Whether the weights of a token's experts are divided by their sum."""

    layers: frozenset[int]
    """Indices of the layers that have experts; the others are dense."""


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """Read `config.json` of a Hugging Face model folder.

    Raises:
        ModelFolderError: if the folder or the file is missing, or it holds no JSON object.
    """
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise ModelFolderError(f"model folder '{folder}' does not exist")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFolderError(f"'{folder}' has no config.json: not a model folder") from None
    except ValueError as error:  # JSONDecodeError or UnicodeDecodeError
        raise ModelFolderError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise ModelFolderError(f"{path}: must hold a JSON object, got {type(config).__name__}")
    return config


def rope_theta(config: dict[str, Any], folder: object, *, kinds: str = "'default'") -> float:
    """Base of the rotary embedding, from either spelling in use; scaled variants are refused.

    Raises:
        ModelFolderError: if there is none, or the variant is another than the default.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ModelFolderError(f"'{folder}': rope type '{kind}' is not supported, only {kinds}")
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ModelFolderError(f"'{folder}': config.json has no rope_theta")
    return float(theta)


def llama_rope(config: dict[str, Any], folder: object) -> dict[str, Any]:
    """Rotary embedding of a Llama model: the default one, or the scaling of Llama 3.1 and later.

    Args:
        config: contents of config.json.
        folder: named in errors.

    Returns:
        Keywords of torchtitan's `RoPE.Config`: theta, and what the scaling needs.

    Raises:
        ModelFolderError: if it is of another kind, or a number of the scaling is missing.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) != "llama3":
        return {"theta": rope_theta(config, folder, kinds="'default' and 'llama3'")}
    plain = {"rope_theta": rope.get("rope_theta", config.get("rope_theta"))}
    values: dict[str, Any] = {"theta": rope_theta(plain, folder), "scaling": "llama"}
    for key, name in _LLAMA3_ROPE.items():
        number = rope.get(key)
        if isinstance(number, bool) or not isinstance(number, int | float) or number <= 0:
            raise ModelFolderError(
                f"'{folder}': config.json: {key} of rope type 'llama3' must be a number above 0, "
                f"got {number!r}"
            )
        values[name] = number
    return values


def with_llama_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the keys that Llama folders may leave out, as transformers fills them in."""
    filled = dict(config)
    num_heads = filled.get("num_attention_heads")
    if filled.get("num_key_value_heads") is None:
        filled["num_key_value_heads"] = num_heads
    width = filled.get("hidden_size")
    if filled.get("head_dim") is None and isinstance(width, int) and isinstance(num_heads, int):
        filled["head_dim"] = width // max(num_heads, 1)
    return filled


def check_supported(config: dict[str, Any], folder: object) -> None:
    """Refuse what is missing, malformed, or would be computed other than the file says.

    Raises:
        ModelFolderError: one line that names the folder and the key.
    """
    missing = [key for key in _SIZES if key not in config]
    if missing:
        raise ModelFolderError(f"'{folder}': config.json lacks {', '.join(missing)}")
    for key in _SIZES:
        if isinstance(config[key], bool) or not isinstance(config[key], int | float):
            raise ModelFolderError(
                f"'{folder}': config.json: {key} must be a number, got {config[key]!r}"
            )
    if config["num_attention_heads"] % config["num_key_value_heads"]:
        raise ModelFolderError(
            f"'{folder}': num_attention_heads {config['num_attention_heads']} is not a multiple of "
            f"num_key_value_heads {config['num_key_value_heads']}"
        )
    if config.get("attention_bias") or config.get("use_sliding_window"):
        raise ModelFolderError(f"'{folder}': attention bias and sliding windows are not supported")
    if config.get("mlp_bias"):
        raise ModelFolderError(f"'{folder}': biases of the feed-forward layers are not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelFolderError(
            f"'{folder}': hidden_act '{config['hidden_act']}' is not supported, only 'silu'"
        )
    if config.get("quantization_config"):
        raise ModelFolderError(
            f"'{folder}': quantized weights are not supported; use the folder with the full ones"
        )


def expert_settings(config: dict[str, Any], folder: object) -> ExpertSettings:
    """Read and check the mixture-of-experts keys of a `qwen3_moe` config.json.

    Args:
        config: contents of config.json that passed `check_supported`.
        folder: named in errors.

    Returns:
        The settings; a layer has experts as transformers decides it: layer i, unless listed in
        `mlp_only_layers`, where i + 1 is a multiple of `decoder_sparse_step`.

    Raises:
        ModelFolderError: one line that names the folder and the key.
    """
    # transformers 5 writes `num_local_experts`, published folders have `num_experts`.
    spellings = {config[key] for key in ("num_experts", "num_local_experts") if key in config}
    if len(spellings) > 1:
        raise ModelFolderError(f"'{folder}': num_experts and num_local_experts differ")
    num_experts = _whole_number(config, folder, "num_experts", *spellings)
    top_k = _whole_number(config, folder, "num_experts_per_tok", config.get("num_experts_per_tok"))
    if top_k > num_experts:
        raise ModelFolderError(
            f"'{folder}': num_experts_per_tok {top_k} exceeds num_experts {num_experts}"
        )
    norm_topk = config.get("norm_topk_prob", False)
    if not isinstance(norm_topk, bool):
        raise ModelFolderError(
            f"'{folder}': config.json: norm_topk_prob must be true or false, got {norm_topk!r}"
        )
    if config.get("shared_expert_intermediate_size") or config.get("n_shared_experts"):
        raise ModelFolderError(f"'{folder}': shared experts are not supported")
    return ExpertSettings(
        num_experts=num_experts,
        top_k=top_k,
        hidden_dim=_whole_number(
            config, folder, "moe_intermediate_size", config.get("moe_intermediate_size")
        ),
        norm_topk=norm_topk,
        layers=_expert_layers(config, folder),
    )


def _expert_layers(config: dict[str, Any], folder: object) -> frozenset[int]:
    num_layers = config["num_hidden_layers"]
    step = _whole_number(
        config, folder, "decoder_sparse_step", config.get("decoder_sparse_step", 1)
    )
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise ModelFolderError(
            f"'{folder}': config.json: mlp_only_layers must be a list of layers, got {dense!r}"
        )
    outside = [i for i in dense if not 0 <= i < num_layers]
    if outside:
        raise ModelFolderError(
            f"'{folder}': mlp_only_layers names layer {outside[0]}, but there are {num_layers}"
        )
    layers = frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
    if not layers:
        raise ModelFolderError(
            f"'{folder}': decoder_sparse_step and mlp_only_layers leave no layer with experts; "
            "the dense model has model_type 'qwen3'"
        )
    return layers


def _whole_number(config: dict[str, Any], folder: object, key: str, value: object = None) -> int:
    if value is None and key not in config:
        raise ModelFolderError(f"'{folder}': config.json lacks {key}")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelFolderError(
            f"'{folder}': config.json: {key} must be a whole number >= 1, got {value!r}"
        )
    return value
