"""Precedence, merging, provenance, and the printer."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli

from rollverify.config.load import load_config, main
from rollverify.config.schema import Config
from rollverify.errors import ConfigError

Write = Callable[..., list[str]]

REPOSITORY = Path(__file__).resolve().parents[3]


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter at the repository root."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def test_defaults_then_files_left_to_right_then_flags(write: Write) -> None:
    first = write("[training]\nsteps = 10\nlr = 0.1\nbeta1 = 0.5", "a.toml")
    second = write("[training]\nlr = 0.2\nbeta1 = 0.6", "b.toml")
    training = load_config([*first, *second, "--training.beta1", "0.7"]).config.training
    assert (training.steps, training.lr, training.beta1) == (10, 0.2, 0.7)
    assert training.beta2 == Config().training.beta2
    assert load_config([*second, *first]).config.training.lr == 0.1


def test_flag_before_a_file_still_wins(write: Write) -> None:
    loaded = load_config(["--training.steps", "7", *write("[training]\nsteps = 10")])
    assert loaded.config.training.steps == 7


def test_tables_merge_at_every_depth_and_lists_replace(write: Write) -> None:
    first = write("[engine.options]\na = [1, 2]\nb = 1\nc = { x = 1, y = 1 }", "a.toml")
    second = write("[engine.options]\na = [3]\nc = { y = 2 }", "b.toml")
    loaded = load_config([*first, *second, "--engine.options", "{ d = 4 }"])
    expected = {"a": [3], "b": 1, "c": {"x": 1, "y": 2}, "d": 4}
    assert loaded.config.engine.options == expected
    assert loaded.sources["engine.options"] == "a.toml, b.toml, --engine.options"


def test_rule_is_checked_after_merging(write: Write) -> None:
    """The file alone would break the rule (100 < 32 + 352); the flags repair it."""
    file = write("[training]\nmicro_batch_tokens = 100")
    loaded = load_config([*file, "--rollout.max-response-tokens", "68"])  # 32 + 68 = 100
    assert loaded.config.training.micro_batch_tokens == 100


def test_broken_rule_names_the_files_and_flags_that_set_its_keys(write: Write) -> None:
    file = write("[training]\nmicro_batch_tokens = 100")
    with pytest.raises(ConfigError) as caught:
        load_config([*file, "--rollout.max-response-tokens", "69"])
    assert str(caught.value).startswith("a.toml, --rollout.max-response-tokens: training.micro_")


@pytest.mark.parametrize("from_file", [True, False])
def test_range_is_reported_from_file_and_flag_alike(write: Write, from_file: bool) -> None:
    file = write("[loss]\nclip_low = -1.0" if from_file else "")
    flags = [] if from_file else ["--loss.clip-low", "-1.0"]
    with pytest.raises(ConfigError, match=r"loss\.clip_low must be > 0 and <= 1, got -1\.0$"):
        load_config([*file, *flags])


def test_error_in_a_file_is_reported_even_if_a_later_layer_replaces_it(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"^a\.toml: 'training\.steps' must be int"):
        load_config([*write("[training]\nsteps = 1.5"), "--training.steps", "3"])


def test_loaded_config_tells_files_overrides_and_sources(write: Write) -> None:
    file = write("[run]\nseed = 3\n[training]\nsteps = 5")
    loaded = load_config([*file, "--training.steps", "6", "--resume"])
    assert loaded.config_files == ("a.toml",)
    assert loaded.resume == "latest"
    assert loaded.overrides == (("training.steps", 6),)
    assert loaded.sources == {"run.seed": "a.toml", "training.steps": "--training.steps"}


def test_without_config_flag_the_default_file_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    loaded = load_config([])
    assert loaded.config_files == ("train_configs/default.toml",)
    assert loaded.config.run.name == "default"


def test_printer_writes_toml_with_sources(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*write("[run]\nseed = 3"), "--training.steps", "6"]) == 0
    text = capsys.readouterr().out
    assert "seed = 3  # a.toml\n" in text and "steps = 6  # --training.steps\n" in text
    assert tomli.loads(text)["rollout"]["group_size"] == 8


def test_printer_reports_one_line_and_exit_code_2(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """CF01: a misspelt key ends the program before anything is loaded."""
    assert main(write("[loss]\nclip_lo = 0.1")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: a.toml: unknown key 'loss.clip_lo'; did you mean 'clip_low'?\n"


def test_printer_as_a_program_prints_json() -> None:
    done = run_python("-m", "rollverify.config.load", "--json", "--training.steps", "6")
    assert done.returncode == 0 and done.stderr == ""
    assert '"steps": 6' in done.stdout


def test_config_layer_does_not_import_torch() -> None:
    code = (
        "import sys; from rollverify.config import load, check, dump; load.main([]);"
        "sys.exit(int(any(name in sys.modules for name in ('torch', 'vllm', 'numpy'))))"
    )
    assert run_python("-c", code).returncode == 0
