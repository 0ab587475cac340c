"""Reads the prompts that a config names: for training and for evaluation.

Like `parts.py` it sees `Config`; what it calls gets plain values. It starts nothing.
"""

from typing import cast

from rollverify.config.schema import Config
from rollverify.data.prompts import Prompt
from rollverify.data.sources import PromptSource, SourceOptions, Use, resolve_source
from rollverify.data.templates import read_chat_template
from rollverify.inputs import ModelFolder, load_encoded
from rollverify.prepare import TEST_FILE, TRAIN_FILE, base_folder
from rollverify.rewards import REWARDS
from rollverify.rollout.prompt_queue import EncodedPrompt


def load_train(config: Config, model: ModelFolder) -> tuple[list[Prompt], list[EncodedPrompt]]:
    """The training prompts, and the same with their ids and graders.

    Raises:
        ConfigError: if `data.train` names nothing that is known.
        DataError: see `load_encoded`.
    """
    return load_from(config, model, prompt_source(config, "train"))


def load_test(config: Config, model: ModelFolder) -> list[EncodedPrompt]:
    """The test problems in use; none where evaluation is off.

    Raises:
        ConfigError: if `data.test` names nothing that is known.
        DataError: see `load_encoded`.
    """
    if not config.evaluation.enable:
        return []
    _, encoded = load_from(config, model, prompt_source(config, "test"))
    return encoded[: config.evaluation.num_problems]


def load_from(
    config: Config, model: ModelFolder, source: PromptSource
) -> tuple[list[Prompt], list[EncodedPrompt]]:
    """Any prompts, worded, limited and graded as the config says.

    Raises:
        ConfigError: if a chat template is asked for that the model has not.
        DataError: see `load_encoded`.
    """
    data = config.data
    return load_encoded(
        source,
        model,
        config.rollout.max_prompt_tokens,
        REWARDS[data.reward],
        long_prompts=data.long_prompts,
        chat=read_chat_template(model.path, data.system_prompt) if data.chat_template else None,
    )


def prompt_source(config: Config, use: Use) -> PromptSource:
    """The source that `data.train` or `data.test` names, without opening it.

    Raises:
        ConfigError: if it names nothing that is known.
    """
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
