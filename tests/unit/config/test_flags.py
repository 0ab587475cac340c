"""The command line: values, switches, --config, --resume, help, and errors."""

import math

import pytest

from rollverify.config.flags import field_docs, parse_flags
from rollverify.config.prepare_table import PrepareConfig
from rollverify.config.schema import SETTINGS
from rollverify.errors import ConfigError

BAD_LINES = [
    ("--trainin.steps 3", "--trainin.steps: unknown flag; did you mean --training.steps?"),
    ("--training.stpes=3", "--training.stpes: unknown flag; did you mean --training.steps?"),
    ("--steps 3", "--steps: unknown flag; did you mean --training.steps?"),
    ("--rollout.lr 3", "--rollout.lr: unknown flag; did you mean --training.lr?"),
    ("--rollout.topp 1", "--rollout.topp: unknown flag; did you mean --rollout.top-p?"),
    ("--training 3", "'training' is a table; give one of its keys, such as --training.steps"),
    ("--xyz", "--xyz: unknown flag; see --help for the list of flags"),
    ("--training.no-steps", "--training.no-steps: unknown flag"),
    ("--training.steps 2.5", "--training.steps: 'training.steps' must be int, got '2.5'"),
    ("--training.steps", "training.steps takes one value of type int, got nothing"),
    ("--training.steps 1 2", "training.steps takes one value of type int, got '1' '2'"),
    ("--training.lr x", "--training.lr: 'training.lr' must be float, got 'x'"),
    ("--training.lr nan", "--training.lr: training.lr must be finite and >= 0, got nan"),
    ("--verification.token-threshold -inf", "must be > 0, or inf, got -inf"),
    (
        "--verification.token-threshold off",
        "'verification.token_threshold' must be float, got 'off'",
    ),
    ("--filter.max-ops inf", "filter.max_ops must be finite and > 0, got inf"),
    ("--verification.window 8", "unknown flag; did you mean --switching.window?"),
    ("--training.steps -1", "--training.steps: training.steps must be >= 1, got -1"),
    ("--loss.name ppo", "'loss.name' must be one of ['grpo', 'dr_grpo', 'gspo', "),
    ("--data.shuffle maybe", "'data.shuffle' must be bool, got 'maybe'; write --data.shuffle, "),
    ("--data.no-shuffle true", "--data.no-shuffle: 'data.shuffle' must be bool, got 'true'"),
    ("--engine.options 3", "--engine.options: 'engine.options' must be a table such as"),
    ("extra", "unexpected argument 'extra'; config files are given as --config FILE"),
    ("-c a.toml", "unexpected argument '-c'"),
    ("--config", "--config: takes a TOML file; repeat --config for another file, got nothing"),
    ("--config a.toml b.toml", "repeat --config for another file, got 'a.toml' 'b.toml'"),
    ("--config=", "--config: takes a TOML file"),
    ("--resume a b", "--resume: takes at most one path, got 'a' 'b'"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_bad_line_is_refused(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_flags(line.split(), "prog")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr() == ("", "")  # tyro's own box is not shown


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
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
        ("--data.shuffle", "data.shuffle", True),
        ("--data.no-shuffle", "data.shuffle", False),
        ("--data.no_shuffle", "data.shuffle", False),
        ("--data.shuffle false", "data.shuffle", False),
        ("--data.shuffle=True", "data.shuffle", True),
        ("--training.steps 3 --training.steps 4", "training.steps", 4),
    ],
)
def test_value_is_read(line: str, key: str, value: object) -> None:
    overrides = parse_flags(line.split(), "prog").overrides
    assert overrides == {key: value}
    assert type(overrides[key]) is SETTINGS[key].kind


def test_engine_options_are_a_toml_table() -> None:
    flags = parse_flags(["--engine.options", "{ block_size = 16, a.b = true }"], "prog")
    assert flags.overrides["engine.options"] == {"block_size": 16, "a": {"b": True}}


def test_config_files_keep_their_order() -> None:
    flags = parse_flags(["--config", "b.toml", "--run.seed", "1", "--config=a.toml"], "prog")
    assert flags.config_files == ("b.toml", "a.toml")


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
def test_resume_path_is_optional(line: str, resume: str | None) -> None:
    assert parse_flags(line.split(), "prog").resume == resume


def test_help_shows_every_flag_with_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_flags(["--training.stpes", "--help"], "prog")
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert text.startswith("usage: prog")
    assert [one.flag for one in SETTINGS.values() if one.flag not in text] == []
    assert "--config FILE" in text and "--resume [PATH]" in text
    assert "Number of hidden permutation tables." in text
    assert "Must be > 0, or inf." in " ".join(text.replace("│", " ").split())


def test_field_docs_reads_attribute_docstrings() -> None:
    assert field_docs(PrepareConfig)["num_layers"] == "Number of transformer layers."
