"""TOML and JSON text of a config, and the difference of two."""

import json
import math
from collections.abc import Callable

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from rollverify.config.dump import diff, to_dict, to_json, to_toml, toml_value
from rollverify.config.load import load_config, read_config
from rollverify.config.losses import Gspo, NoCorrection
from rollverify.config.tables import Config, VerificationConfig

Write = Callable[..., list[str]]

PLAIN = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, derandomize=True, deadline=None)
@given(PLAIN)
def test_toml_value_round_trips(value: object) -> None:
    assert tomli.loads(f"x = {toml_value(value)}")["x"] == value


def test_toml_value_refuses_what_toml_does_not_have() -> None:
    with pytest.raises(TypeError, match="no TOML form for None"):
        toml_value(None)


def test_toml_round_trips_through_load(write: Write) -> None:
    odd = {"text": 'a "b" \\ \n é', "list": [1, 2.5, True], "a b": {"x": 1e-9}}
    tables = {"engine": {"options": odd}, "model": {"path": 'C:\\x "y"'}, "training": {"lr": 1e-7}}
    config = read_config(settings=tables | {"loss": {"name": "a:b", "settings": {"c": [1, "d"]}}})
    assert load_config(write(to_toml(config))).config == config


def test_toml_with_sources_still_loads(write: Write) -> None:
    text = to_toml(Config(), {"run.seed": "x.toml"})
    assert "seed = 0  # x.toml" in text
    assert load_config(write(text)).config == Config()


def test_infinity_round_trips_through_toml_and_is_text_in_json(write: Write) -> None:
    """JSON has no infinity, and a bare `Infinity` is refused by most readers."""
    verification = VerificationConfig(segment_threshold=math.inf)
    config = Config(verification=verification)
    assert "segment_threshold = inf\n" in to_toml(config)
    assert load_config(write(to_toml(config))).config == config
    values = json.loads(to_json(config), parse_constant=pytest.fail)
    assert values["verification"]["segment_threshold"] == "inf"
    assert values["verification"]["token_threshold"] == 2.0


def test_json_holds_every_value() -> None:
    assert json.loads(to_json(Config())) == to_dict(Config())


def test_dict_is_by_table_and_key() -> None:
    values = to_dict(Config())
    assert list(values)[:2] == ["run", "method"]
    assert values["loss"]["clip_high"] == 0.3


def test_diff_shows_infinity_as_it_is_written() -> None:
    verification = VerificationConfig(token_threshold=math.inf)
    new = Config(verification=verification)
    assert diff(Config(), new) == ["verification.token_threshold: 2.0 -> inf"]


def test_diff_lists_changed_settings_in_schema_order() -> None:
    old, new = Config(), read_config(settings={"training": {"steps": 61}, "run": {"name": "b"}})
    assert diff(old, new) == ['run.name: "default" -> "b"', "training.steps: 60 -> 61"]
    assert diff(new, new) == []


def test_diff_of_two_losses_says_what_one_of_them_has_not() -> None:
    sequence = Gspo(aggregation="sequence_mean")
    changed = diff(Config(), Config(loss=sequence, correction=NoCorrection()))
    assert {'loss.name: "grpo" -> "gspo"', "loss.dual_clip: 0.0 -> unset"} <= set(changed)
