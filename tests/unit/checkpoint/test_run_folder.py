"""Run folders: naming, the newest one, and the config that a resumed run takes."""

import os

import pytest

from rollverify.checkpoint import run_folder
from rollverify.config.load import load_config
from rollverify.errors import CheckpointError, ConfigError


def config(output_dir, *flags):
    return load_config(["--run.output-dir", str(output_dir), *flags]).config


def add_run(output_dir, name, *, saved_at=None):
    """A run folder with its config; with checkpoints if it has a time of saving."""
    folder = output_dir / name
    folder.mkdir(parents=True)
    run_folder.write_config(folder, config(output_dir, "--training.steps", "7"))
    if saved_at is not None:
        (folder / "checkpoints").mkdir()
        os.utime(folder / "checkpoints", (saved_at, saved_at))
    return folder


def test_runs_of_one_second_get_folders_of_their_own(tmp_path):
    made = [run_folder.create(config(tmp_path / "out", "--run.name", "abc")) for _ in range(3)]
    assert len(set(made)) == 3
    assert all(one.is_dir() and not list(one.iterdir()) for one in made)
    assert all(one.parent == tmp_path / "out" and one.name.startswith("abc-2") for one in made)


def test_an_output_folder_that_cannot_be_written_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.output_dir .*file' cannot be written") as caught:
        run_folder.create(config(tmp_path / "file"))
    assert "--run.output-dir" in str(caught.value) and "\n" not in str(caught.value)


def test_the_written_config_loads_as_the_same_config(tmp_path):
    original = config(
        tmp_path, "--training.lr", "3e-4", "--run.name", "x", "--data.shuffle", "false"
    )
    run_folder.write_config(tmp_path, original)
    assert load_config(["--config", str(tmp_path / "config.toml")]).config == original
    assert sorted(one.name for one in tmp_path.iterdir()) == ["config.json", "config.toml"]


def test_latest_is_the_run_whose_checkpoints_changed_last(tmp_path):
    add_run(tmp_path, "run-b", saved_at=200)
    add_run(tmp_path, "run-c", saved_at=100)
    add_run(tmp_path, "run-d")  # Newer, but nothing to resume from.
    assert run_folder.find_run(config(tmp_path), "latest") == tmp_path / "run-b"


def test_no_run_to_resume_is_a_user_error(tmp_path):
    add_run(tmp_path, "run-a")
    with pytest.raises(CheckpointError, match="no run with checkpoints below"):
        run_folder.find_run(config(tmp_path), "latest")
    with pytest.raises(CheckpointError, match="'nowhere' is not a folder"):
        run_folder.find_run(config(tmp_path), "nowhere")


def test_a_new_run_takes_the_command_line_alone(tmp_path):
    loaded, folder = run_folder.resolve(["--training.steps", "3"])
    assert folder is None
    assert loaded.config.training.steps == 3


def test_a_resumed_run_takes_its_own_config_and_flags_win(tmp_path):
    run = add_run(tmp_path, "run-a", saved_at=1)
    loaded, folder = run_folder.resolve(["--resume", str(run)])
    assert folder == run
    assert loaded.config.training.steps == 7
    loaded, _ = run_folder.resolve(["--resume", str(run), "--training.steps", "9"])
    assert loaded.config.training.steps == 9
    assert loaded.config.run.output_dir == str(tmp_path)


@pytest.mark.parametrize("form", ["two words", "one word"])
def test_a_config_that_is_given_replaces_the_one_of_the_run(tmp_path, form):
    run = add_run(tmp_path, "run-a", saved_at=1)
    (tmp_path / "other.toml").write_text("[training]\nsteps = 11\n")
    given = ["--config", str(tmp_path / "other.toml")]
    if form == "one word":
        given = ["=".join(given)]
    loaded, _ = run_folder.resolve(["--resume", str(run), *given])
    assert loaded.config.training.steps == 11


def test_a_run_without_config_asks_for_one(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(CheckpointError, match=r"holds no config\.toml; give --config"):
        run_folder.resolve(["--resume", str(tmp_path / "run")])


def test_changed_settings_are_named_with_both_values(tmp_path):
    folder = add_run(tmp_path, "run-a")
    lines = run_folder.changed_settings(folder, config(tmp_path, "--training.steps", "9"))
    assert lines == ["training.steps: 7 -> 9"]


def test_a_new_run_has_no_changed_settings(tmp_path):
    assert run_folder.changed_settings(tmp_path, config(tmp_path)) == []
