"""Config files of the losses: one for each, free to combine with every method."""

from pathlib import Path

import pytest

from rollverify.config.dump import diff
from rollverify.config.files import read_values
from rollverify.config.load import load_config
from rollverify.config.loss_rules import CORRECTION_SETTINGS, LOSS_SETTINGS
from rollverify.config.loss_tables import CorrectionConfig, LossConfig
from rollverify.config.schema import SETTINGS
from rollverify.config.setting import settings_of
from rollverify.losses import LOSSES
from rollverify.losses.corrections import CORRECTIONS

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT = "train_configs/default.toml"


def files_in(folder: str) -> list[str]:
    found = sorted((REPOSITORY / "train_configs" / folder).glob("*.toml"))
    return [str(one.relative_to(REPOSITORY)) for one in found]


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def test_every_loss_has_a_file_of_its_name() -> None:
    assert {Path(file).stem for file in files_in("losses")} == set(LOSSES)
    for file in files_in("losses"):
        assert load_config(["--config", file]).config.loss.name == Path(file).stem


@pytest.mark.parametrize("file", files_in("losses"))
def test_a_loss_file_holds_the_objective_and_nothing_else(file: str) -> None:
    tables = {SETTINGS[key].table for key in read_values(file)}
    assert tables <= {"run", "loss", "correction", "advantage"}


@pytest.mark.parametrize("loss", files_in("losses"))
@pytest.mark.parametrize("method", files_in("methods"))
def test_a_loss_goes_with_every_method(method: str, loss: str) -> None:
    files = [flag for file in (DEFAULT, method, loss) for flag in ("--config", file)]
    assert load_config(files).config.loss.name == Path(loss).stem


def test_the_file_of_the_default_loss_restates_the_defaults() -> None:
    files = ["--config", DEFAULT, "--config", "train_configs/losses/grpo.toml"]
    changed = diff(load_config(files[:2]).config, load_config(files).config)
    assert changed == ['run.name: "default" -> "grpo"']


def test_the_config_names_every_loss_and_correction() -> None:
    assert SETTINGS["loss.name"].choices == tuple(LOSSES)
    assert SETTINGS["correction.name"].choices == ("none", *CORRECTIONS)


def test_the_rules_know_which_losses_read_a_setting() -> None:
    """A setting without readers in the tables is read by all of them."""
    read_by_all = {"name", "denominator", "entropy_coefficient", "mask_truncated", "aggregation"}
    read_by_all |= {"masked_in_denominator"}
    assert set(settings_of(LossConfig)) - read_by_all == set(LOSS_SETTINGS)
    assert set(settings_of(CorrectionConfig)) - {"name"} == set(CORRECTION_SETTINGS)
    assert set().union(*LOSS_SETTINGS.values()) == set(LOSSES) - {"reinforce"}
