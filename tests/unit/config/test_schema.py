"""The tables: paper defaults, immutability, and that each default obeys the rules."""

import dataclasses

import pytest

from rollverify.config.schema import SETTINGS, TABLES, Config


def test_paper_defaults() -> None:
    config = Config()
    assert (config.loss.clip_low, config.loss.clip_high) == (0.2, 0.3)
    assert config.correction.threshold == 2.0
    assert config.rollout.group_size == 8
    verification, switching = config.verification, config.switching
    assert (verification.segment_threshold, verification.token_threshold) == (0.01, 2.0)
    assert (switching.window, switching.threshold, switching.average) == (8, 0.5, "window")
    assert (config.method.name, config.filter.name) == ("rollverify", "off")
    assert not (switching.reversible or verification.symmetric)


def test_default_engine_holds_every_response_in_flight() -> None:
    """2 * 32 prompts * 8 responses = 512."""
    rollout = Config().rollout
    in_flight = rollout.oversampling * rollout.prompts_per_step * rollout.group_size
    assert Config().engine.max_num_seqs == in_flight == 512


def test_settings_are_unique_and_in_table_order() -> None:
    tables = list(dict.fromkeys(setting.table for setting in SETTINGS.values()))
    assert tables == list(TABLES)
    assert len(SETTINGS) == sum(len(dataclasses.fields(table)) for table in TABLES.values())


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().training.steps = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_two_configs_do_not_share_engine_options() -> None:
    first, second = Config(), Config()
    first.engine.options["block_size"] = 16
    assert second.engine.options == {}
