"""Reads a Hugging Face `config.json` and refuses what would be computed other than it says."""

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

MODEL_TYPES = ("llama", "qwen3", "qwen3_moe")

_LARGEST = {
    "vocab_size": 2**31 - 1,
    "max_position_embeddings": 2**31 - 1,
    "num_hidden_layers": 10_000,
    "num_experts": 10_000,
    "num_local_experts": 10_000,
}
_LARGEST_WIDTH = 2**19
"""Of every other size: experts x width x width in float32 still have a number of bytes."""

_NOT_SUPPORTED = {
    "attention_bias": "attention biases",
    "use_sliding_window": "sliding windows",
    "mlp_bias": "biases of the feed-forward layers",
    "shared_expert_intermediate_size": "shared experts",
    "n_shared_experts": "shared experts",
}
_LLAMA_THETA = 10000.0
"""Base of a Llama folder that names none, as those of Llama 2; transformers and vLLM take it."""

_LLAMA3_FACTORS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

_CURE = "restore the config.json that the model came with"
_ANOTHER = "use another model"


class ModelFolderError(ValueError):
    """A model folder that is missing, incomplete or of an architecture without a spec."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertConfig:
    """The mixture-of-experts part of a config.json."""

    num_experts: int
    top_k: int
    hidden_size: int
    norm_topk: bool
    """Whether the weights of a token's experts are divided by their sum."""

    layers: frozenset[int]
    """Indices of the layers that have experts; the others are dense."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HfConfig:
    """Checked values of a config.json under its own keys, with what a folder may leave out."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    initializer_range: float
    tie_word_embeddings: bool
    rope: dict[str, Any]
    """Keywords of torchtitan's `RoPE.Config`: theta, and the numbers of a scaling."""

    experts: ExpertConfig | None
    """None for a dense model."""


_SIZES = [field.name for field in fields(HfConfig) if field.type is int]


def read_hf_config(folder: str | Path) -> HfConfig:
    """Checked config.json of a model folder; ModelFolderError names folder, key and cure."""
    values = _Values(folder, _read_json(Path(folder)))
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise values.error(
            f"model_type {_shown(model_type)} is not supported",
            f"supported: {', '.join(MODEL_TYPES)}",
        )
    if model_type == "llama":
        values = _with_llama_sizes(values)
    missing = [key for key in (*_SIZES, "rms_norm_eps") if key not in values.given]
    if missing:
        raise values.lacks(*missing)
    sizes = {key: values.size(key) for key in _SIZES}
    num_heads, num_kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    if num_heads % num_kv_heads:
        raise values.error(
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads "
            f"{num_kv_heads}"
        )
    if sizes["head_dim"] % 2:  # The rotary embedding turns pairs.
        raise values.wrong("head_dim", "even")
    for key, part in _NOT_SUPPORTED.items():
        if value := values.get(key):
            what = f"{key} is {_shown(value)}, but {part} are not supported"
            raise values.error(what, _ANOTHER)
    if values.get("quantization_config"):
        what = "quantization_config: quantized weights are not supported"
        raise values.error(what, "use the folder with the full ones")
    if values.get("hidden_act", "silu") != "silu":
        act = _shown(values.get("hidden_act"))
        raise values.error(f"hidden_act {act} is not supported, only 'silu'", _ANOTHER)
    return HfConfig(
        model_type=model_type,
        **sizes,
        rms_norm_eps=values.number("rms_norm_eps"),
        initializer_range=values.number("initializer_range", default=0.02, or_zero=True),
        tie_word_embeddings=values.flag("tie_word_embeddings"),
        rope=_rope(values, model_type),
        experts=_experts(values) if model_type == "qwen3_moe" else None,
    )


def _read_json(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not folder.is_dir():
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


def _shown(value: object) -> str:
    """A value for a message: on one line, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:56]} ..."


@dataclass(frozen=True, slots=True)
class _Values:
    """Values of a config.json, or of an object in it; each is checked or refused in one line."""

    folder: str | Path
    given: dict[str, Any]

    def get(self, key: str, default: object = None) -> Any:
        return self.given.get(key, default)

    def error(self, what: str, cure: str = _CURE) -> ModelFolderError:
        return ModelFolderError(f"'{self.folder}': config.json: {what}; {cure}")

    def lacks(self, *keys: str) -> ModelFolderError:
        return ModelFolderError(f"'{self.folder}': config.json lacks {', '.join(keys)}; {_CURE}")

    def wrong(self, key: str, wanted: str, cure: str = _CURE) -> ModelFolderError:
        return self.error(f"{key} must be {wanted}, got {_shown(self.given[key])}", cure)

    def size(self, key: str) -> int:
        """At least 1, and not so large that the model's bytes have no number.

        A float is refused even where it is whole: transformers, and with it the engine, refuses it,
        so a trainer that took it would only move the error to the end of the start-up.
        """
        if key not in self.given:
            raise self.lacks(key)
        value, largest = self.given[key], _LARGEST.get(key, _LARGEST_WIDTH)
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= largest:
            return value
        is_whole = isinstance(value, float) and value.is_integer() and 1 <= value <= largest
        cure = f"write {int(value)}" if is_whole else _CURE
        raise self.wrong(key, f"a whole number from 1 to {largest}", cure)

    def number(self, key: str, *, default: float | None = None, or_zero: bool = False) -> float:
        """Finite and above 0, written as a whole number or not."""
        if key not in self.given:
            if default is None:
                raise self.lacks(key)
            return default
        value = self.given[key]
        try:
            number = math.nan if isinstance(value, bool | str) else float(value)
        except (TypeError, OverflowError):  # Or a whole number of more than 308 digits.
            number = math.nan
        if not math.isfinite(number) or number < 0 or (number == 0 and not or_zero):
            least = "of at least" if or_zero else "above"
            raise self.wrong(key, f"a finite number {least} 0")
        return number

    def flag(self, key: str) -> bool:
        """False where it is missing; the text "false" is refused."""
        if not isinstance(self.get(key, False), bool):
            raise self.wrong(key, "true or false")
        return self.get(key, False)


def _with_llama_sizes(values: _Values) -> _Values:
    """With the sizes that Llama folders may leave out, as transformers fills them in.

    It refuses a width that is no multiple of the heads even where the file has a head size.
    """
    width, num_heads = values.size("hidden_size"), values.size("num_attention_heads")
    if width % num_heads:
        raise values.error(
            f"hidden_size {width} is not a multiple of num_attention_heads {num_heads}"
        )
    known = {"num_key_value_heads": num_heads, "head_dim": width // num_heads}
    absent = {key: size for key, size in known.items() if values.get(key) is None}
    return _Values(values.folder, values.given | absent)


def _rope(values: _Values, model_type: str) -> dict[str, Any]:
    """The default embedding or, for Llama, the scaling of Llama 3.1; from either key in use."""
    found: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        rope = values.get(key)
        if rope is not None and not isinstance(rope, dict):
            raise values.wrong(key, "an object")
        found = rope or found
    by_layer = [key for key, value in found.items() if isinstance(value, dict)]
    if by_layer:
        what = f"rotary embeddings by layer ({_shown(by_layer[0])}) are not supported"
        raise values.error(what, _ANOTHER)
    kind = found.get("rope_type", found.get("type", "default"))
    kinds = ("default", "llama3") if model_type == "llama" else ("default",)
    if kind not in kinds:
        known = " and ".join(map(repr, kinds))
        what = f"rope type {_shown(kind)} is not supported, only {known}"
        raise values.error(what, _ANOTHER)
    rope = _Values(values.folder, found)
    # A scaled model whose base is missing has lost it.
    default = _LLAMA_THETA if model_type == "llama" and kind == "default" else None
    theta = (rope if "rope_theta" in found else values).number("rope_theta", default=default)
    if kind == "default":
        return {"theta": theta}
    factor = rope.number("factor")
    low, high, original = (rope.number(key) for key in _LLAMA3_FACTORS)
    if high <= low:
        raise values.error(f"high_freq_factor {high} must be above low_freq_factor {low}")
    factors = dict(zip(_LLAMA3_FACTORS, (low, high, original), strict=True))
    return {"theta": theta, "scaling": "llama", "scaling_factor": factor, **factors}


def _experts(values: _Values) -> ExpertConfig:
    # transformers 5 writes `num_local_experts`, published folders have `num_experts`.
    keys = [key for key in ("num_experts", "num_local_experts") if key in values.given]
    num_experts, *others = (values.size(key) for key in keys or ["num_experts"])
    if others and others != [num_experts]:
        raise values.error(f"num_experts {num_experts} and num_local_experts {others[0]} differ")
    top_k = values.size("num_experts_per_tok")
    if top_k > num_experts:
        raise values.error(f"num_experts_per_tok {top_k} exceeds num_experts {num_experts}")
    return ExpertConfig(
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=values.size("moe_intermediate_size"),
        norm_topk=values.flag("norm_topk_prob"),
        layers=_expert_layers(values),
    )


def _expert_layers(values: _Values) -> frozenset[int]:
    """As transformers: layer i where i + 1 is a multiple of the step, unless listed as dense."""
    num_layers = values.size("num_hidden_layers")
    step = values.size("decoder_sparse_step") if "decoder_sparse_step" in values.given else 1
    dense = values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise values.wrong("mlp_only_layers", "a list of layers")
    outside = [i for i in dense if not 0 <= i < num_layers]
    if outside:
        raise values.error(
            f"mlp_only_layers names layer {_shown(outside[0])}, but there are {num_layers}"
        )
    layers = frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
    if not layers:
        raise values.error(
            "decoder_sparse_step and mlp_only_layers leave no layer with experts",
            "the dense model has model_type 'qwen3'",
        )
    return layers
