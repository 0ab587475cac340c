"""Reads what a run starts from: model folder, tokenizer, prompts; refuses what does not fit.

Loads no weights and starts no engine, so a mistake is found within a second or two.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from rollverify.data.encoding import EncodedText, encode_prompts
from rollverify.data.prompts import Prompt, read_prompt_set
from rollverify.data.sources import PromptSource
from rollverify.data.templates import ChatTemplate
from rollverify.errors import ConfigError, DataError
from rollverify.rewards import Reward, readable_indices
from rollverify.rollout.model_config import NUM_EXPERTS_KEYS, has_experts
from rollverify.rollout.prompt_queue import EncodedPrompt
from rollverify.training.routing import RoutingShape


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFolder:
    """What is known of a model before its weights are read."""

    path: Path
    """Hugging Face folder."""

    vocab_size: int
    """Rows of the embedding."""

    max_positions: int
    """Context length, tokens."""

    stop_token_id: int
    """Id that ends a response."""

    tokenizer: Tokenizer
    """From tokenizer.json."""

    routing: RoutingShape | None = None
    """Layers and experts of a mixture-of-experts model; None for a dense one."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)


def read_model_folder(path: Path, max_sequence_tokens: int) -> ModelFolder:
    """Check a model folder and read its tokenizer.

    Args:
        path: Hugging Face folder.
        max_sequence_tokens: longest prompt plus response of the run.

    Raises:
        ConfigError: if the folder is missing or incomplete, or its context is too short.
        DataError: if tokenizer and model do not belong together.
    """
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
        stop_token_id=_stop_token_id(config, path, tokenizer, vocab_size),
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


def _stop_token_id(
    config: dict[str, Any], path: Path, tokenizer: Tokenizer, vocab_size: int
) -> int:
    """The id in config.json (of several the first), else that of the tokenizer's eos token."""
    stop = config.get("eos_token_id")
    if isinstance(stop, list):
        stop = stop[0] if stop else None
    if stop is None and (path / "tokenizer_config.json").is_file():
        eos = _read_json(path / "tokenizer_config.json", path).get("eos_token")
        eos = eos.get("content") if isinstance(eos, dict) else eos
        stop = tokenizer.token_to_id(eos) if isinstance(eos, str) else None
    if stop is None:
        raise ConfigError(
            f"model.path '{path}': neither config.json nor the tokenizer names an eos token; add "
            "eos_token_id to config.json"
        )
    if isinstance(stop, bool) or not isinstance(stop, int) or not 0 <= stop < vocab_size:
        raise ConfigError(
            f"model.path '{path}': eos_token_id {stop!r} is not below vocab_size = {vocab_size}"
        )
    return stop


def load_encoded(
    source: PromptSource | Path,
    model: ModelFolder,
    max_prompt_tokens: int,
    reward: Reward,
    *,
    long_prompts: Literal["error", "drop"] = "error",
    chat: ChatTemplate | None = None,
) -> tuple[list[Prompt], list[EncodedPrompt]]:
    """Prompts of a source with their token ids and graders.

    Args:
        source: where they are; a path is a file with the columns "prompt" and "answer".
        model: tokenizer and decoder.
        max_prompt_tokens: longest prompt allowed.
        reward: scores a decoded response.
        long_prompts: whether a longer one is an error or is dropped and counted.
        chat: the model's chat template, if prompts go through it.

    Returns:
        (prompts, encoded prompts), in the order of the source; prompts whose answer the reward
        cannot read are left out and counted in a log line.

    Raises:
        DataError: see `read_prompt_set` and `encode_prompts`; or an answer that nothing could
            match.
    """
    if isinstance(source, Path):
        source = PromptSource(location=source)
    prompt_set = read_prompt_set(source, chat.render if chat else None)
    texts = encode_prompts(
        prompt_set, model.tokenizer, max_prompt_tokens, long_prompts=long_prompts
    )
    kept = readable_indices([text.prompt for text in texts], reward, str(source.location))
    texts = [texts[index] for index in kept]
    for text in texts:
        _check_answer(text, reward)
    encoded = [
        EncodedPrompt(
            token_ids=text.token_ids,
            grade=_grader(text.prompt, reward, model.decode),
            prompt_index=index,
        )
        for index, text in enumerate(texts)
    ]
    return [text.prompt for text in texts], encoded


def _check_answer(text: EncodedText, reward: Reward) -> None:
    try:
        reward.check(text.prompt)
    except DataError as error:
        raise DataError(f"{text.place}: {error}") from error


def _grader(
    prompt: Prompt, reward: Reward, decode: Callable[[Sequence[int]], str]
) -> Callable[[Sequence[int]], float]:
    return lambda token_ids: reward(prompt, decode(token_ids))


def encoded_batches(
    batches: Iterable[list[Prompt]], prompts: list[Prompt], encoded: list[EncodedPrompt]
) -> Iterator[list[EncodedPrompt]]:
    """The loader's batches with each prompt replaced by its encoded form."""
    by_id = {prompt.prompt_id: item for prompt, item in zip(prompts, encoded, strict=True)}
    for batch in batches:
        yield [by_id[prompt.prompt_id] for prompt in batch]
