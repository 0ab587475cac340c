"""The tables: paper defaults, types, and what a loss below leaves for the one above."""

import math
from collections.abc import Callable

import pytest
from pydantic import ValidationError

from rollverify.config.load import load_config
from rollverify.config.losses import CustomLoss, Gspo, GspoToken
from rollverify.config.tables import Config, TrainingConfig

Write = Callable[..., list[str]]


def test_paper_defaults() -> None:
    config = Config()
    assert dict(config.loss)["clip_low"] == 0.2 and dict(config.loss)["clip_high"] == 0.3
    assert dict(config.correction)["threshold"] == 2.0
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


def test_config_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().training.steps = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_two_configs_do_not_share_engine_options() -> None:
    first, second = Config(), Config()
    first.engine.options["block_size"] = 16
    assert second.engine.options == {}


def test_int_for_float_is_stored_as_float() -> None:
    assert type(TrainingConfig(lr=1).lr) is float


def test_infinity_is_read_where_it_is_allowed(write: Write) -> None:
    write("[verification]\nsegment_threshold = inf\ntoken_threshold = +inf")
    verification = load_config(["--config", "a.toml"]).config.verification
    assert verification.segment_threshold == verification.token_threshold == math.inf


@pytest.mark.parametrize("name", ["dr_grpo", "decoupled_ppo"])
def test_a_loss_by_flag_alone_has_its_own_clip(write: Write, name: str) -> None:
    """FAULTS F19: the 0.3 of grpo below does not leak into the loss above."""
    file = write("[loss]\nname = 'grpo'\nclip_high = 0.3\nentropy_coefficient = 0.5")
    flags = ["--loss.name", name, "--correction.name", "none", "--advantage.std", "none"]
    flags += ["--loss.aggregation", "constant_length"]
    loss = load_config([*file, *flags]).config.loss
    assert dict(loss)["clip_high"] == 0.2
    assert loss.entropy_coefficient == 0.5  # all losses have it


def test_what_two_losses_share_stays(write: Write) -> None:
    text = "[loss]\nname = 'gspo'\nclip_low = 0.1\naggregation = 'sequence_mean'\n"
    file = write(text + "[correction]\nname = 'none'")
    loaded = load_config([*file, "--loss.name", "gspo_token"])
    assert loaded.config.loss == GspoToken(clip_low=0.1, aggregation="sequence_mean")
    assert loaded.sources["loss.clip_low"] == "a.toml"
    same = load_config([*file, "--loss.clip-high", "0.2"]).config.loss
    assert same == Gspo(clip_low=0.1, clip_high=0.2, aggregation="sequence_mean")


def test_the_order_of_flags_does_not_matter(write: Write) -> None:
    flags = ["--correction.max-age", "3", "--correction.name", "mask_stale"]
    loaded = load_config([*write(""), *flags])
    assert dict(loaded.config.correction) == {"name": "mask_stale", "max_age": 3}


def test_settings_of_another_loss_of_ones_own_go(write: Write) -> None:
    file = write("[loss]\nname = 'a.py:f'\nsettings = { x = 1 }")
    loaded = load_config([*file, "--loss.settings", "{ y = 2 }"])
    assert loaded.config.loss == CustomLoss(name="a.py:f", settings={"x": 1, "y": 2})
    loaded = load_config([*file, "--loss.name", "a.py:g"])
    assert loaded.config.loss == CustomLoss(name="a.py:g")
    assert "loss.settings" not in loaded.sources
