"""Reads a Hugging Face model folder as far as a run needs it before weights are loaded."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from tokenizers import Tokenizer

from rollverify.errors import ConfigError, DataError

NUM_EXPERTS_KEYS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
"""Names of the number of experts in config.json."""


class RoutingShape(NamedTuple):
    """What the expert ids of one token look like."""

    num_layers: int
    """Dense ones included; their ids are never read."""
    experts_per_token: int
    num_experts: int
    """Of a layer."""

    @property
    def dtype(self) -> torch.dtype:
        """Type that holds the ids."""
        return torch.uint8 if self.num_experts <= 256 else torch.int16


def read_model_config(model_folder: str) -> dict[str, Any]:
    """Contents of config.json; empty where there is none or none that can be read."""
    try:
        config = json.loads((Path(model_folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def has_experts(model_config: dict[str, Any]) -> bool:
    """Whether the model routes tokens to experts, under any of the names for their number."""
    return any(model_config.get(key) for key in NUM_EXPERTS_KEYS)


def check_experts(model_folder: str, model_config: dict[str, Any]) -> None:
    """Refuse to record the routing of a model without experts, by its config.json."""
    if not has_experts(model_config):
        raise ConfigError(
            f"'{model_folder}' has no experts whose routing could be recorded; use a "
            "mixture-of-experts model or set routing_replay.mode to off"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFolder:
    """What is known of a model before its weights are read."""

    path: Path
    vocab_size: int
    """Rows of the embedding."""

    max_positions: int
    """Context length, tokens."""

    stop_token_ids: tuple[int, ...]
    """Any of them ends a response and is its last token; ascending."""

    tokenizer: Tokenizer
    routing: RoutingShape | None = None
    """None for a dense model."""

    def named(self, token_id: int) -> str:
        """A token as the log shows it."""
        return f"{self.tokenizer.id_to_token(token_id)!r} ({token_id})"

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)


def read_model_folder(path: Path, max_sequence_tokens: int) -> ModelFolder:
    """Check a model folder and read its tokenizer."""
    if not path.is_dir():
        raise ConfigError(f"model.path '{path}' is not a folder; give a Hugging Face model folder")
    config = _read_json(path / "config.json", path)
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"model.path '{path}' holds no *.safetensors weights")
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(f"model.path '{path}' holds no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # `tokenizers` raises the bare class.
        raise DataError(f"{path}/tokenizer.json cannot be read ({error})") from error
    # A fine-tuning run may have left these in the file: prompts would be cut, or padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocab_size = _whole_number(config, "vocab_size", path)
    max_positions = _whole_number(config, "max_position_embeddings", path)
    largest_id = max(tokenizer.get_vocab().values(), default=-1)
    if largest_id >= vocab_size:
        raise DataError(
            f"{path}: tokenizer.json has ids up to {largest_id}, the model only {vocab_size} "
            "embeddings; the tokenizer belongs to another model"
        )
    if max_sequence_tokens > max_positions:
        raise ConfigError(
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {max_sequence_tokens} "
            f"exceeds the model's context of {max_positions} tokens; lower one of them"
        )
    return ModelFolder(
        path=path,
        vocab_size=vocab_size,
        max_positions=max_positions,
        stop_token_ids=_stop_token_ids(config, path, tokenizer, vocab_size),
        tokenizer=tokenizer,
        routing=_routing(config, path),
    )


def _routing(config: dict[str, Any], path: Path) -> RoutingShape | None:
    if not has_experts(config):
        return None
    key = next(key for key in NUM_EXPERTS_KEYS if config.get(key))
    return RoutingShape(
        num_layers=_whole_number(config, "num_hidden_layers", path),
        experts_per_token=_whole_number(config, "num_experts_per_tok", path),
        num_experts=_whole_number(config, key, path),
    )


def _read_json(file: Path, folder: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"model.path '{folder}' holds no {file.name}") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # Neither JSON nor UTF-8, or nested too deep.
        raise ConfigError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {type(values).__name__}")
    return values


def _whole_number(config: dict[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{path}/config.json: {key} must be a whole number >= 1, got {value!r}")
    return value


def _stop_token_ids(
    config: dict[str, Any], path: Path, tokenizer: Tokenizer, vocab_size: int
) -> tuple[int, ...]:
    """All that config.json, generation_config.json and the tokenizer name as end of a text."""
    generation = _read_json_if_there(path / "generation_config.json", path)
    found: set[int] = set()
    for file, values in (("config.json", config), ("generation_config.json", generation)):
        stop = values.get("eos_token_id")
        for one in cast(list[Any], stop) if isinstance(stop, list) else [stop]:
            if one is not None:
                found.add(_checked_id(one, f"{path}/{file}: eos_token_id", vocab_size))
    eos = _read_json_if_there(path / "tokenizer_config.json", path).get("eos_token")
    eos = cast(dict[str, Any], eos).get("content") if isinstance(eos, dict) else eos
    stop = tokenizer.token_to_id(eos) if isinstance(eos, str) else None
    if stop is not None:
        found.add(_checked_id(stop, f"{path}/tokenizer_config.json: eos_token", vocab_size))
    if not found:
        raise ConfigError(
            f"model.path '{path}': neither config.json, generation_config.json nor the tokenizer "
            "names an eos token; add eos_token_id to config.json"
        )
    return tuple(sorted(found))


def _read_json_if_there(file: Path, folder: Path) -> dict[str, Any]:
    return _read_json(file, folder) if file.is_file() else {}


def _checked_id(value: object, place: str, vocab_size: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise ConfigError(f"{place} {value!r} is not below vocab_size = {vocab_size}")
    return value


def check_expert_settings(model: ModelFolder, replay: str, expert_parallel: int) -> None:
    """Refuse what a dense model lacks or the experts do not allow, before anything is started."""
    if model.routing is None:
        for setting, is_set, cure in (
            (f"routing_replay.mode = '{replay}'", replay != "off", "routing_replay.mode = 'off'"),
            (f"parallelism.expert_parallel = {expert_parallel}", expert_parallel > 1, "it to 1"),
        ):
            if is_set:
                raise ConfigError(
                    f"{setting} needs a mixture-of-experts model, '{model.path}' is dense; set "
                    f"{cure} or another model"
                )
    elif model.routing.num_experts % expert_parallel:
        raise ConfigError(
            f"parallelism.expert_parallel = {expert_parallel} must divide the "
            f"{model.routing.num_experts} experts of '{model.path}'"
        )
