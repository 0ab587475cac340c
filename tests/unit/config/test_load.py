"""Precedence, merging, provenance, and the printer."""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli

from rollverify.config.load import default_config_file, load_config, main, read_config
from rollverify.config.tables import SETTINGS, Config
from rollverify.errors import ConfigError

Write = Callable[..., list[str]]

NESTED = {"a": {"b": True}}

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


VALUES = [
    ("--training.steps 20", "training.steps", 20),
    ("--training.steps=20", "training.steps", 20),
    ("--rollout.group-size 4", "rollout.group_size", 4),
    ("--rollout.group_size 4", "rollout.group_size", 4),
    ("--weight-sync.probe-tokens 9", "weight_sync.probe_tokens", 9),
    ("--rollout.top-k -1", "rollout.top_k", -1),
    ("--training.lr 1", "training.lr", 1.0),
    ("--training.lr 1e-3", "training.lr", 1e-3),
    ("--training.lr-decay cosine", "training.lr_decay", "cosine"),
    ("--verification.segment-threshold inf", "verification.segment_threshold", math.inf),
    ("--verification.no-measure", "verification.measure", False),
    ("--rollout.oversampling 1", "rollout.oversampling", 1.0),
    ("--model.path=--odd", "model.path", "--odd"),
    ("--model.path=a=b", "model.path", "a=b"),
    ("--model.path=", "model.path", ""),
    ("--model.path 3", "model.path", "3"),
    ("--data.shuffle", "data.shuffle", True),
    ("--data.no-shuffle", "data.shuffle", False),
    ("--data.no_shuffle", "data.shuffle", False),
    ("--data.shuffle false", "data.shuffle", False),
    ("--data.shuffle=True", "data.shuffle", True),
    ("--training.steps 3 --training.steps 4", "training.steps", 4),
    ("--engine.options {block_size=16,a.b=true}", "engine.options", {"block_size": 16} | NESTED),
]


@pytest.mark.parametrize(("line", "key", "value"), VALUES)
def test_flag_is_read(write: Write, line: str, key: str, value: object) -> None:
    loaded = load_config([*write(""), *line.split()])
    assert set(loaded.sources) == {key}
    table, _, name = key.partition(".")
    found = getattr(getattr(loaded.config, table), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("line", "resume"),
    [
        ("", None),
        ("--resume", "latest"),
        ("--resume --run.seed 1", "latest"),
        ("--resume outputs/x", "outputs/x"),
        ("--resume=outputs/x", "outputs/x"),
    ],
)
def test_resume_path_is_optional(write: Write, line: str, resume: str | None) -> None:
    assert load_config([*write(""), *line.split()]).resume == resume


def test_config_files_keep_their_order(write: Write) -> None:
    write("", "a.toml"), write("", "b.toml")
    loaded = load_config(["--config", "b.toml", "--run.seed", "1", "--config=a.toml"])
    assert loaded.config_files == ("b.toml", "a.toml")


def test_empty_file_and_byte_order_mark_are_accepted(write: Write) -> None:
    assert load_config(write("")).sources == {}
    assert load_config(write("\ufeff[run]\nseed = 3")).config.run.seed == 3


def test_config_from_python(write: Write) -> None:
    write("[training]\nsteps = 10\nlr = 0.1")
    config = read_config(["a.toml"], {"training": {"lr": 1}})
    assert (config.training.steps, config.training.lr) == (10, 1.0)
    assert read_config() == Config()


def test_default_file_of_the_current_folder_comes_first(write: Write, tmp_path: Path) -> None:
    write("")
    assert Path(default_config_file()).is_absolute()  # beside the package
    (tmp_path / "train_configs").mkdir()
    (tmp_path / "train_configs" / "default.toml").touch()
    assert default_config_file() == "train_configs/default.toml"


def test_help_shows_every_flag_with_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(["--training.stpes", "--help"], prog="prog")
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert text.startswith("usage: prog")
    assert [key for key in SETTINGS if f"--{key.replace('_', '-')}" not in text] == []
    assert "--config FILE" in text and "--resume [PATH]" in text
    text = " ".join(text.replace("│", " ").split())
    assert "Undefined" not in text and "--rollout.stop-token-ids [VALUE, ...]" in text
    assert "Number of hidden permutation tables." in text
    assert "Must be > 0, or inf." in text
    assert "gspo, gspo_token: The response's ratio is clipped below" in text


def test_loaded_config_tells_files_overrides_and_sources(write: Write) -> None:
    file = write("[run]\nseed = 3\n[training]\nsteps = 5")
    loaded = load_config([*file, "--training.steps", "6", "--resume"])
    assert loaded.config_files == ("a.toml",)
    assert loaded.resume == "latest"
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
    assert err == "error: a.toml: unknown key 'loss.clip_lo'; did you mean loss.clip_low?\n"


def test_printer_as_a_program_prints_json() -> None:
    done = run_python("-m", "rollverify.config.load", "--json", "--training.steps", "6")
    assert done.returncode == 0 and done.stderr == ""
    assert '"steps": 6' in done.stdout


def test_config_layer_does_not_import_torch() -> None:
    code = (
        "import sys; from rollverify.config import load; load.main([]);"
        "sys.exit(int(any(name in sys.modules for name in ('torch', 'vllm', 'numpy'))))"
    )
    assert run_python("-c", code).returncode == 0
