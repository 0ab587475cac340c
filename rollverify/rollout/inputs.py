"""The prompts that a config names, encoded and with their graders; refuses what does not fit."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

from rollverify.config.tables import Config
from rollverify.data.encoding import EncodedText, encode_prompts
from rollverify.data.prompts import Prompt, read_prompt_set
from rollverify.data.sources import PromptSource, SourceOptions, Use, resolve_source
from rollverify.data.templates import ChatTemplate, read_chat_template
from rollverify.engine.model_folder import ModelFolder, read_model_folder
from rollverify.errors import ConfigError, DataError
from rollverify.rewards import Reward, make_reward, readable_indices
from rollverify.rollout.prompt_queue import EncodedPrompt
from rollverify.toy.settings import TEST_FILE, TRAIN_FILE, base_folder, is_prepared

logger = logging.getLogger(__name__)


def load_encoded(
    source: PromptSource | Path,
    model: ModelFolder,
    max_prompt_tokens: int,
    reward: Reward,
    *,
    long_prompts: Literal["error", "drop"] = "error",
    chat: ChatTemplate | None = None,
) -> tuple[list[Prompt], list[EncodedPrompt]]:
    """Prompts of a source, in its order, and the same with their token ids and graders.

    A path is a file with the columns "prompt" and "answer". Prompts whose answer the reward cannot
    read are left out and counted in a log line; what cannot be read or is too long is a DataError.
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


def load_model_folder(config: Config) -> ModelFolder:
    """The model that a config trains; a ConfigError if it is the base model and not prepared."""
    max_tokens = config.rollout.max_sequence_tokens
    if config.model.path:
        return read_model_folder(Path(config.model.path), max_tokens)
    if not is_prepared(config.prepare):
        raise ConfigError(
            "the base model is not prepared; run `python -m rollverify.toy.base_model` with the "
            "same flags first (./run_train.sh does), or set model.path"
        )
    return read_model_folder(base_folder(config.prepare), max_tokens)


def make_run_reward(config: Config) -> Reward:
    """One object for all prompts of a run: it may own processes."""
    return make_reward(
        config.data.reward,
        time_out_s=config.reward.time_out_s,
        num_workers=config.reward.num_workers,
    )


def with_stop_tokens(config: Config, model: ModelFolder) -> ModelFolder:
    """The model that also stops where its chat template ends its turn, and at the config's ids.

    A base model's folder names the end of a document, its chat template another token. Says in the
    log what ends a response.
    """
    added = list(config.rollout.stop_token_ids)
    for token_id in added:
        if token_id >= model.vocab_size:
            raise ConfigError(
                f"rollout.stop_token_ids: {token_id} is not below the model's vocab_size = "
                f"{model.vocab_size}"
            )
    if config.data.chat_template:
        end = read_chat_template(model.path, config.data.system_prompt).turn_end()
        token_id = None if end is None else model.tokenizer.token_to_id(end)
        added += [] if token_id is None else [token_id]
    model = replace(model, stop_token_ids=tuple(sorted({*model.stop_token_ids, *added})))
    logger.info(
        "a response ends at %s or after %d tokens; no special token is put before a prompt",
        " or ".join(map(model.named, model.stop_token_ids)),
        config.rollout.max_response_tokens,
    )
    return model


def load_inputs(
    config: Config, model: ModelFolder, reward: Reward
) -> tuple[list[Prompt], list[EncodedPrompt], list[EncodedPrompt]]:
    """Training prompts, the same with ids and graders, and the test problems in use, if any."""
    prompts, encoded = load_from(config, model, prompt_source(config, "train"), reward)
    test: list[EncodedPrompt] = []
    if config.evaluation.enable:
        _, test = load_from(config, model, prompt_source(config, "test"), reward)
        test = test[: config.evaluation.num_problems]
    names = f"method {config.method.name}, loss {config.loss.name}, model {model.path}"
    logger.info("%s, %d training prompts, %d test prompts", names, len(prompts), len(test))
    return prompts, encoded, test


def load_from(
    config: Config, model: ModelFolder, source: PromptSource, reward: Reward
) -> tuple[list[Prompt], list[EncodedPrompt]]:
    """Any prompts, worded, limited and graded as the config says; see `load_encoded`."""
    data = config.data
    return load_encoded(
        source,
        model,
        config.rollout.max_prompt_tokens,
        reward,
        long_prompts=data.long_prompts,
        chat=read_chat_template(model.path, data.system_prompt) if data.chat_template else None,
    )


def prompt_source(config: Config, use: Use) -> PromptSource:
    """The source that `data.train` or `data.test` names, without opening it."""
    data = config.data
    if use == "train":
        text, file, columns, hub = data.train, TRAIN_FILE, data.train_columns, data.train_hub
    else:
        text, file, columns, hub = data.test, TEST_FILE, data.test_columns, data.test_hub
    options = SourceOptions(
        columns=cast(dict[str, str], columns),  # the config's rules have checked them
        hub=cast(dict[str, str], hub),
        answer_format=data.answer_format,
        template=data.template,
        duplicates=data.duplicates,
    )
    text = text or str(base_folder(config.prepare) / file)
    return resolve_source(text, use=use, setting=f"data.{use}", options=options)
