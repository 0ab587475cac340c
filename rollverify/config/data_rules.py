"""Rules over [data]: the keys of its small tables, the template, and what belongs together.

It cannot tell whether a file exists or a preset is known: that is found when the data is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollverify.config.rule_error import RuleError

if TYPE_CHECKING:
    from rollverify.config.schema import Config

COLUMN_KEYS = ("prompt", "answer", "id")
"""What `data.train_columns` and `data.test_columns` may name a column for."""

HUB_KEYS = ("subset", "split", "revision")
"""What `data.train_hub` and `data.test_hub` may hold."""

TEMPLATE_NAMES = ("auto", "none", "boxed", "answer_line")
"""Values of `data.template` that are not a text of their own."""


def check_data_rules(config: Config) -> None:
    """Check every rule about the prompts.

    Raises:
        RuleError: naming the first broken rule, its values and the cure.
    """
    data = config.data
    if data.train and not data.test and config.evaluation.enable:
        raise RuleError(
            ("data.train", "data.test"),
            "data.train is set but data.test is not, so accuracy would be measured on another "
            "task; set data.test or evaluation.enable = false",
        )
    for source, place, table, keys in (
        (data.train, "data.train", "columns", COLUMN_KEYS),
        (data.test, "data.test", "columns", COLUMN_KEYS),
        (data.train, "data.train", "hub", HUB_KEYS),
        (data.test, "data.test", "hub", HUB_KEYS),
    ):
        entries: dict[str, object] = getattr(data, f"{place.removeprefix('data.')}_{table}")
        _check_table(f"{place}_{table}", entries, keys)
        if entries and not source:
            raise RuleError(
                (f"{place}_{table}", place),
                f"{place}_{table} is set but {place} is not, so it would change nothing; set "
                f"{place} or remove it",
            )
    _check_wording(config)


def _check_table(key: str, entries: dict[str, object], keys: tuple[str, ...]) -> None:
    for name, value in entries.items():
        if name not in keys:
            raise RuleError((key,), f"{key} cannot hold {name!r}; it holds {', '.join(keys)}")
        if not isinstance(value, str) or not value:
            raise RuleError((key,), f"{key}.{name} must be a name in quotes, got {value!r}")


def _check_wording(config: Config) -> None:
    data = config.data
    if data.reward == "math" and not data.train and not data.test:
        raise RuleError(
            ("data.reward", "data.train"),
            "data.reward = 'math' reads the last \\boxed{} of a response, which the built-in task "
            "never asks for; set data.train and data.test, or data.reward = 'exact_answer'",
        )
    if data.template not in TEMPLATE_NAMES and data.template.count("{prompt}") != 1:
        raise RuleError(
            ("data.template",),
            f"data.template must be one of {', '.join(TEMPLATE_NAMES)} or a text that holds "
            f"{{prompt}} once, got {data.template[:60]!r}",
        )
    if data.system_prompt and not data.chat_template:
        raise RuleError(
            ("data.system_prompt", "data.chat_template"),
            "data.system_prompt is sent through the chat template, which is off; set "
            "data.chat_template = true or put the text into data.template",
        )
