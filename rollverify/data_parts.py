"""Reads the prompts that a config names: for training and for evaluation.

Like `parts.py` it sees `Config`; what it calls gets plain values. It starts nothing, and imports
torch only when prompts are encoded.
"""

import logging
from typing import TYPE_CHECKING, cast

from rollverify.config.schema import Config
from rollverify.data.prompts import Prompt
from rollverify.data.sources import PromptSource, SourceOptions, Use, resolve_source
from rollverify.data.templates import read_chat_template
from rollverify.prepare import TEST_FILE, TRAIN_FILE, base_folder
from rollverify.rewards import Reward, make_reward

if TYPE_CHECKING:
    from rollverify.inputs import ModelFolder
    from rollverify.rollout.prompt_queue import EncodedPrompt


logger = logging.getLogger(__name__)


def make_run_reward(config: Config) -> Reward:
    """One object for all prompts of a run: it may own processes.

    Raises:
        ConfigError: if the reward needs a package that is not installed.
    """
    return make_reward(
        config.data.reward,
        time_out_s=config.reward.time_out_s,
        num_workers=config.reward.num_workers,
    )


def load_inputs(
    config: Config, model: "ModelFolder", reward: Reward
) -> tuple[list[Prompt], list["EncodedPrompt"], list["EncodedPrompt"]]:
    """Training prompts, the same with their ids and graders, and the test problems in use.

    There are no test problems where evaluation is off.

    Raises:
        ConfigError: if `data.train` or `data.test` names nothing that is known.
        DataError: see `load_encoded`.
    """
    prompts, encoded = load_from(config, model, prompt_source(config, "train"), reward)
    test: list[EncodedPrompt] = []
    if config.evaluation.enable:
        _, test = load_from(config, model, prompt_source(config, "test"), reward)
        test = test[: config.evaluation.num_problems]
    names = f"method {config.method.name}, loss {config.loss.name}, model {model.path}"
    logger.info("%s, %d training prompts, %d test prompts", names, len(prompts), len(test))
    return prompts, encoded, test


def load_from(
    config: Config, model: "ModelFolder", source: PromptSource, reward: Reward
) -> tuple[list[Prompt], list["EncodedPrompt"]]:
    """Any prompts, worded, limited and graded as the config says.

    Raises:
        ConfigError: if a chat template is asked for that the model has not.
        DataError: see `load_encoded`.
    """
    from rollverify.inputs import load_encoded

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
