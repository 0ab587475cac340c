"""Reads a Hugging Face `config.json` and refuses what would be computed other than it says.

Knows the keys of Llama and of dense and mixture-of-experts Qwen3; builds nothing, reads no weights.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_ext.config_values import (
    CURE,
    ModelFolderError,
    flag,
    real_number,
    shown,
    whole_number,
    wrong,
)

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
_NOT_SUPPORTED = {
    "attention_bias": "attention biases",
    "use_sliding_window": "sliding windows",
    "mlp_bias": "biases of the feed-forward layers",
}
_LLAMA_THETA = 10000.0
"""Base of a Llama folder that names none, as those of Llama 2; transformers and vLLM take it."""

_LLAMA3_ROPE = {
    "factor": "scaling_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}
"""Keys of a llama3 scaling in config.json, and torchtitan's names for them."""


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
    except OSError as error:
        raise ModelFolderError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # Neither JSON nor UTF-8, or nested too deep.
        raise ModelFolderError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise ModelFolderError(f"{path}: must hold a JSON object, got {type(config).__name__}")
    return config


def rope_theta(config: dict[str, Any], folder: object, *, kinds: str = "'default'") -> float:
    """Base of the rotary embedding, from either spelling in use; scaled variants are refused.

    Raises:
        ModelFolderError: if there is none above 0, or the variant is another than the default.
    """
    rope = _rope(config, folder)
    kind = _rope_type(rope)
    if kind != "default":
        raise ModelFolderError(
            f"'{folder}': config.json: rope type {shown(kind)} is not supported, only {kinds}; use "
            "another model"
        )
    return real_number(rope if "rope_theta" in rope else config, folder, "rope_theta")


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
    rope = _rope(config, folder)
    if _rope_type(rope) != "llama3":
        # Not for llama3: a scaled model whose base is missing has lost it.
        known = {"rope_theta": _LLAMA_THETA} | config
        return {"theta": rope_theta(known, folder, kinds="'default' and 'llama3'")}
    theta = real_number(rope if "rope_theta" in rope else config, folder, "rope_theta")
    values = {name: real_number(rope, folder, key) for key, name in _LLAMA3_ROPE.items()}
    low, high = values["low_freq_factor"], values["high_freq_factor"]
    if high <= low:
        raise ModelFolderError(
            f"'{folder}': config.json: high_freq_factor {high} must be above low_freq_factor "
            f"{low}; {CURE}"
        )
    return {"theta": theta, "scaling": "llama", **values}


def _rope(config: dict[str, Any], folder: object) -> dict[str, Any]:
    """Settings of the rotary embedding, from either key in use; empty where there are none."""
    found: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if rope is not None and not isinstance(rope, dict):
            raise wrong(folder, key, "an object", rope)
        found = rope or found
    by_layer = [key for key, value in found.items() if isinstance(value, dict)]
    if by_layer:
        raise ModelFolderError(
            f"'{folder}': config.json: rotary embeddings by layer ({shown(by_layer[0])}) are not "
            "supported; use another model"
        )
    return found


def _rope_type(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def with_llama_defaults(config: dict[str, Any], folder: object) -> dict[str, Any]:
    """The config with the keys that Llama folders may leave out, as transformers fills them in.

    Raises:
        ModelFolderError: if width and number of heads are not sizes, or the width is no multiple
            of the heads, which transformers refuses even where the file has a head size.
    """
    filled = dict(config)
    width = whole_number(filled, folder, "hidden_size")
    num_heads = whole_number(filled, folder, "num_attention_heads")
    if width % num_heads:
        raise ModelFolderError(
            f"'{folder}': config.json: hidden_size {width} is not a multiple of "
            f"num_attention_heads {num_heads}; {CURE}"
        )
    if filled.get("num_key_value_heads") is None:
        filled["num_key_value_heads"] = num_heads
    if filled.get("head_dim") is None:
        filled["head_dim"] = width // num_heads
    return filled


def check_supported(config: dict[str, Any], folder: object) -> None:
    """Refuse what is missing, malformed, or would be computed other than the file says.

    Raises:
        ModelFolderError: one line that names the folder and the key.
    """
    missing = [key for key in (*_SIZES, "rms_norm_eps") if key not in config]
    if missing:
        raise ModelFolderError(f"'{folder}': config.json lacks {', '.join(missing)}; {CURE}")
    sizes = {key: whole_number(config, folder, key) for key in _SIZES}
    if sizes["num_attention_heads"] % sizes["num_key_value_heads"]:
        raise ModelFolderError(
            f"'{folder}': config.json: num_attention_heads {sizes['num_attention_heads']} is not "
            f"a multiple of num_key_value_heads {sizes['num_key_value_heads']}; {CURE}"
        )
    if sizes["head_dim"] % 2:  # The rotary embedding turns pairs.
        raise wrong(folder, "head_dim", "even", sizes["head_dim"])
    real_number(config, folder, "rms_norm_eps")
    if "initializer_range" in config:
        real_number(config, folder, "initializer_range", or_zero=True)
    flag(config, folder, "tie_word_embeddings")
    for key, part in _NOT_SUPPORTED.items():
        if config.get(key):
            raise ModelFolderError(
                f"'{folder}': config.json: {key} is {shown(config[key])}, but {part} are not "
                "supported; use another model"
            )
    if config.get("hidden_act", "silu") != "silu":
        raise ModelFolderError(
            f"'{folder}': config.json: hidden_act {shown(config['hidden_act'])} is not supported, "
            "only 'silu'; use another model"
        )
    if config.get("quantization_config"):
        raise ModelFolderError(
            f"'{folder}': config.json: quantization_config: quantized weights are not supported; "
            "use the folder with the full ones"
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
    keys = [key for key in ("num_experts", "num_local_experts") if key in config] or ["num_experts"]
    num_experts, *others = (whole_number(config, folder, key) for key in keys)
    if others and others != [num_experts]:
        raise ModelFolderError(
            f"'{folder}': config.json: num_experts {num_experts} and num_local_experts "
            f"{others[0]} differ; {CURE}"
        )
    top_k = whole_number(config, folder, "num_experts_per_tok")
    if top_k > num_experts:
        raise ModelFolderError(
            f"'{folder}': config.json: num_experts_per_tok {top_k} exceeds num_experts "
            f"{num_experts}; {CURE}"
        )
    if config.get("shared_expert_intermediate_size") or config.get("n_shared_experts"):
        raise ModelFolderError(f"'{folder}': shared experts are not supported")
    return ExpertSettings(
        num_experts=num_experts,
        top_k=top_k,
        hidden_dim=whole_number(config, folder, "moe_intermediate_size"),
        norm_topk=flag(config, folder, "norm_topk_prob"),
        layers=_expert_layers(config, folder),
    )


def _expert_layers(config: dict[str, Any], folder: object) -> frozenset[int]:
    num_layers = config["num_hidden_layers"]
    step = whole_number({"decoder_sparse_step": 1} | config, folder, "decoder_sparse_step")
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise wrong(folder, "mlp_only_layers", "a list of layers", dense)
    outside = [i for i in dense if not 0 <= i < num_layers]
    if outside:
        raise ModelFolderError(
            f"'{folder}': config.json: mlp_only_layers names layer {shown(outside[0])}, but there "
            f"are {num_layers}; {CURE}"
        )
    layers = frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
    if not layers:
        raise ModelFolderError(
            f"'{folder}': decoder_sparse_step and mlp_only_layers leave no layer with experts; "
            "the dense model has model_type 'qwen3'"
        )
    return layers
