"""Rules over [data]: each broken one is a line that names key, value and cure."""

import pytest

from rollverify.config.rule_error import RuleError
from rollverify.config.schema import Config, DataConfig

BOTH = {"train": "a.jsonl", "test": "b.jsonl"}

BROKEN = [
    ({"train": "a.jsonl"}, "set data.test or evaluation.enable = false"),
    ({"train_columns": {"prompt": "q"}}, "data.train_columns is set but data.train is not"),
    ({"test_hub": {"split": "dev"}}, "data.test_hub is set but data.test is not"),
    (
        BOTH | {"test_columns": {"question": "q"}},
        "data.test_columns cannot hold 'question'; it holds prompt, answer, id",
    ),
    (
        BOTH | {"train_hub": {"name": "x"}},
        "data.train_hub cannot hold 'name'; it holds subset, split, revision",
    ),
    (BOTH | {"train_columns": {"id": 3}}, "data.train_columns.id must be a name in quotes, got 3"),
    (BOTH | {"test_hub": {"split": ""}}, "data.test_hub.split must be a name in quotes, got ''"),
    ({"template": "boxd"}, "must be one of auto, none, boxed, answer_line or a text"),
    ({"template": "{prompt} {prompt}"}, "a text that holds {prompt} once"),
    ({"template": ""}, "data.template must be one of"),
    ({"system_prompt": "Be brief."}, "set data.chat_template = true"),
    ({"reward": "math"}, "which the built-in task never asks for"),
]


@pytest.mark.parametrize(("settings", "message"), BROKEN)
def test_broken_rule_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(RuleError) as caught:
        Config(data=DataConfig(**settings))  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert {f"data.{key}" for key in settings} & set(caught.value.keys)


@pytest.mark.parametrize(
    "settings",
    [
        {"test": "b.jsonl"},
        {"template": "Q: {prompt}\nA: {braces}"},
        {"system_prompt": "Be brief.", "chat_template": True},
        {"reward": "math", "test": "gsm8k:test.jsonl"},
        BOTH | {"train_columns": {"prompt": "q", "answer": "a", "id": "i"}},
        BOTH | {"test_hub": {"subset": "main", "split": "dev", "revision": "v1"}},
    ],
)
def test_value_at_the_edge_of_a_rule_is_accepted(settings: dict[str, object]) -> None:
    Config(data=DataConfig(**settings))  # type: ignore[arg-type]
