"""Types, bounds and introspection of single settings."""

import math
from dataclasses import dataclass

import pytest

from rollverify.config.schema import SETTINGS, TABLES
from rollverify.config.setting import Range, Table, check_value, settings_of, table_name
from rollverify.config.training_tables import TrainingConfig
from rollverify.errors import ConfigError


def test_range_bounds_are_inclusive_or_exclusive_as_named() -> None:
    assert 0.0 in Range(ge=0) and 0.0 not in Range(gt=0)
    assert 1.0 in Range(le=1) and 1.0 not in Range(lt=1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_range_without_bounds_refuses_what_is_not_finite(value: float) -> None:
    assert value not in Range()


def test_range_special_value_is_allowed_outside_the_bounds() -> None:
    shard = Range(ge=1, special=-1)
    assert -1 in shard and 0 not in shard
    assert str(shard) == ">= 1, or -1"


def test_range_may_allow_infinity_but_neither_nan_nor_minus_infinity() -> None:
    limit = Range(gt=0, allow_inf=True)
    assert math.inf in limit and 1e-300 in limit
    assert math.nan not in limit and -math.inf not in limit and 0.0 not in limit
    assert str(limit) == "> 0, or inf"


def test_int_for_float_is_stored_as_float() -> None:
    value = check_value(SETTINGS["training.lr"], 1)
    assert type(value) is float and value == 1.0


def test_table_built_in_code_stores_int_for_float_as_float() -> None:
    assert type(TrainingConfig(lr=1).lr) is float


def test_table_built_in_code_refuses_a_bad_value() -> None:
    with pytest.raises(ConfigError, match=r"^training\.steps must be >= 1, got 0$"):
        TrainingConfig(steps=0)


def test_bool_is_not_an_int() -> None:
    with pytest.raises(ConfigError, match=r"^'training\.steps' must be int, got bool True$"):
        check_value(SETTINGS["training.steps"], True)


def test_int_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"training\.lr must be finite and >= 0, got inf"):
        check_value(SETTINGS["training.lr"], 10**400)


def test_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(ConfigError) as caught:
        check_value(SETTINGS["training.lr"], "x\n" * 500)
    assert len(str(caught.value)) < 120 and "\n" not in str(caught.value)


def test_a_time_out_that_no_timer_can_be_set_to_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward\.time_out_s must be > 0 and <= 3600"):
        check_value(SETTINGS["reward.time_out_s"], 1e300)


def test_text_with_a_nul_is_refused() -> None:
    """No file, folder or name can hold one, and the system's own complaint names no setting."""
    with pytest.raises(ConfigError, match=r"'run\.output_dir' must not hold a NUL character"):
        check_value(SETTINGS["run.output_dir"], "a\0b")


def test_table_names_match_the_fields_of_config() -> None:
    assert all(table_name(table) == name for name, table in TABLES.items())


def test_setting_of_an_unsupported_type_is_a_programming_error() -> None:
    @dataclass(kw_only=True, slots=True, frozen=True)
    class OddConfig(Table):
        pair: tuple[int, int] = (0, 0)

    with pytest.raises(TypeError, match=r"odd\.pair"):
        settings_of(OddConfig)


def test_flag_is_kebab_case_and_key_is_snake_case() -> None:
    setting = SETTINGS["weight_sync.probe_tokens"]
    assert (setting.flag, setting.key) == ("--weight-sync.probe-tokens", "weight_sync.probe_tokens")
