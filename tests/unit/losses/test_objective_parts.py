"""From the config to the objective: every loss and correction gets the settings it takes."""

import dataclasses
import inspect

import pytest

from rollverify.build import make_credit, make_objective
from rollverify.config.load import load_config
from rollverify.config.schema import Config
from rollverify.losses import LOSSES
from rollverify.losses.corrections import CORRECTIONS
from rollverify.losses.objective import Objective


def settings_of(function: object) -> dict[str, object]:
    """Keyword settings of a loss or correction with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    found = {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}
    found.pop("limit", None)  # From the batch, not from the config.
    return found


@pytest.fixture
def flags_for(tmp_path, monkeypatch):
    """Command line flags in an empty folder, so that no file is read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.toml").write_text("")
    return lambda *flags: load_config(["--config", "empty.toml", *flags]).config


LOSS_FLAGS = {
    "dr_grpo": ["--advantage.std", "none", "--loss.aggregation", "constant_length"],
    "gspo": ["--loss.aggregation", "sequence_mean"],
    "gspo_token": ["--loss.aggregation", "sequence_mean"],
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_gets_the_settings_it_takes(name, flags_for):
    flags = [*LOSS_FLAGS.get(name, []), "--correction.name", "none"]
    objective = make_objective(flags_for("--loss.name", name, *flags))
    right = settings_of(LOSSES[name])
    assert objective.loss_name == name
    assert objective.loss_settings.keys() == right.keys()
    # Defaults are those of the paper; the clip of dr_grpo and decoupled_ppo is shared with grpo.
    shared = {"clip_low", "clip_high"} if name in ("dr_grpo", "decoupled_ppo") else set()
    for setting in right.keys() - shared:
        assert objective.loss_settings[setting] == right[setting], setting


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_gets_the_settings_it_takes(name, flags_for):
    objective = make_objective(flags_for("--correction.name", name))
    assert objective.correction_settings == settings_of(CORRECTIONS[name])


def test_without_a_correction_truncation_by_token_is_measured(flags_for):
    objective = make_objective(
        flags_for("--correction.name", "none", "--correction.threshold", "3")
    )
    assert objective.correction_name == "none"
    assert objective.correction_settings == {"threshold": 3.0}


def test_the_default_config_is_the_default_objective():
    objective, default = make_objective(Config()), Objective()
    assert objective.loss_settings == settings_of(LOSSES["grpo"])
    assert objective.correction_settings == settings_of(CORRECTIONS["truncated"])
    bare = {"loss_settings": {}, "correction_settings": {}}
    assert dataclasses.replace(objective, **bare) == default


def test_every_other_setting_arrives(flags_for):
    config = flags_for(
        *("--loss.denominator", "anchor_at_sampling", "--loss.entropy-coefficient", "0.01"),
        *("--kl.coefficient", "0.2", "--kl.estimator", "k2", "--loss.dual-clip", "3"),
        *("--advantage.baseline", "leave_one_out", "--advantage.std", "none"),
        *("--advantage.overlong-buffer-tokens", "50", "--advantage.overlong-factor", "0.5"),
        "--loss.mask-truncated",
    )
    objective, credit = make_objective(config), make_credit(config)
    assert objective.denominator == "anchor_at_sampling" and objective.entropy_coefficient == 0.01
    assert (objective.kl_coefficient, objective.kl_estimator) == (0.2, "k2")
    assert objective.loss_settings["dual_clip"] == 3.0
    assert (credit.baseline, credit.std) == ("leave_one_out", "none")
    assert (credit.overlong_buffer_tokens, credit.overlong_factor) == (50, 0.5)
    assert credit.mask_truncated and credit.max_response_tokens == 352
