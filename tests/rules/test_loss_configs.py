"""Config files of the losses: one for each, free to combine with every method."""

from pathlib import Path

import pytest

from rollverify.config.dump import diff
from rollverify.config.function import load_function
from rollverify.config.load import load_config, read_file
from rollverify.config.losses import CORRECTIONS, LOSSES
from rollverify.losses.corrections import CORRECTION_FUNCTIONS

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
    assert set(read_file(file)) <= {"run", "loss", "correction", "advantage"}


@pytest.mark.parametrize("loss", files_in("losses"))
@pytest.mark.parametrize("method", files_in("methods"))
def test_a_loss_goes_with_every_method(method: str, loss: str) -> None:
    files = [flag for file in (DEFAULT, method, loss) for flag in ("--config", file)]
    assert load_config(files).config.loss.name == Path(loss).stem


def test_the_file_of_the_default_loss_restates_the_defaults() -> None:
    files = ["--config", DEFAULT, "--config", "train_configs/losses/grpo.toml"]
    changed = diff(load_config(files[:2]).config, load_config(files).config)
    assert changed == ['run.name: "default" -> "grpo"']


def test_every_loss_and_correction_has_a_table_and_a_function() -> None:
    for name, table in LOSSES.items():
        function = load_function("loss.name", f"rollverify.losses.{table.function}")
        assert function.__name__ == name and function.__annotations__["settings"] is table
    assert set(CORRECTIONS) == set(CORRECTION_FUNCTIONS)
