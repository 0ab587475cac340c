"""Every mistake in a file or flag is one line that names place, key and cure (CF01, CF03)."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rollverify.config.load import load_config, read_config
from rollverify.errors import ConfigError

Write = Callable[..., list[str]]

BAD_FILES = [
    ("[rollout]\ngroup_siz = 4", "unknown key 'rollout.group_siz'; did you mean rollout.group_s"),
    ("[loss]\nclip = 0.1", "unknown key 'loss.clip'; did you mean loss.clip_low?"),
    ("[loss]\ngspo_clip_low = 3e-4", "'loss.gspo_clip_low'; did you mean loss.clip_low?"),
    ("[rollout]\nlr = 1e-3", "unknown key 'rollout.lr'; did you mean training.lr?"),
    ("[method]\nzzz = 1", "unknown key 'method.zzz'; the keys of [method] are name"),
    ("[method]\nwindow = 8", "unknown key 'method.window'; did you mean switching.window?"),
    ("[trainin]\nsteps = 1", "unknown table 'trainin'; did you mean [training]?"),
    ("[verify]\nd_ss = 0.01", "unknown table 'verify'; did you mean [verification]?"),
    ("steps = 1", "unknown table 'steps'; did you mean training.steps?"),
    ("[xyz]", "unknown table 'xyz'; the tables are run, method, verification"),
    ("training = 5", "'training' must be a table, got 5; write it as [training]"),
    ("loss = 5", "'loss' must be a table, got 5; write it as [loss]"),
    ("[[training]]\nsteps = 1", "'training' must be a table, got [{'steps': 1}]"),
    ('[training]\nlr = "1e-6"', "training.lr must be a valid number, got '1e-6'"),
    ("[rollout]\ngroup_size = 2.5", "rollout.group_size must be a valid integer, got 2.5"),
    ('[data]\nshuffle = "false"', "data.shuffle must be a valid boolean, got 'false'"),
    ("[data]\nshuffle = 0", "data.shuffle must be a valid boolean, got 0"),
    ("[training]\nsteps = true", "training.steps must be a valid integer, got True"),
    ("[training]\nlr = true", "training.lr must be a valid number, got True"),
    ("[run]\nname = 3", "run.name must be a valid string, got 3"),
    ("[engine]\noptions = 3", "engine.options must be a valid table, got 3"),
    ("[training.steps]\na = 1", "training.steps must be a valid integer, got {'a': 1}"),
    ('[loss]\nname = "ppo"', "loss.name must be one of 'grpo', 'dr_grpo', 'gspo', "),
    ("[loss]\nname = 3", "loss.name must be a valid string, got 3"),
    ('[loss]\nname = "m:"', "'module:function' or 'file.py:function', got 'm:'"),
    ('[correction]\nname = "x"', "correction.name must be 'none', 'truncated', 'masked', 'icepop'"),
    ('[data]\nreward = "maths"', "data.reward must be one of 'exact_answer', 'math', 'module:func"),
    ("[rollout]\ntop_p = 0", "rollout.top_p must be greater than 0, got 0"),
    ("[rollout]\ngroup_size = 1", "rollout.group_size must be greater than or equal to 2, got 1"),
    ("[filter]\nmax_staleness = 0", "filter.max_staleness must be greater than or equal to 1"),
    ("[loss]\nclip_low = -1.0", "loss.clip_low must be greater than 0, got -1.0"),
    ("[loss]\nclip_low = 1.5", "loss.clip_low must be less than or equal to 1, got 1.5"),
    ("[training]\nlr = nan", "training.lr must be a finite number, got nan"),
    ("[training]\nlr = inf", "training.lr must be a finite number, got inf"),
    ("[training]\nlr = 1e308", "training.lr must be less than or equal to 1, got 1e+308"),
    (f"[training]\nlr = {10**400}", "training.lr must be a valid number, got 1000"),
    (f"[training]\nsteps = {2**200}", "training.steps must be less than or equal to 1000000000"),
    ("[rollout]\ntemperature = 1e-300", "rollout.temperature must be greater than or equal to 0."),
    ("[reward]\ntime_out_s = 1e300", "reward.time_out_s must be less than or equal to 3600"),
    ("[verification]\ntoken_threshold = nan", "token_threshold must be greater than 0, got nan"),
    ("[verification]\ntoken_threshold = -inf", "must be greater than 0, got -inf"),
    ("[verification]\nsegment_threshold = 0", "must be greater than 0, got 0"),
    ('[verification]\nsegment_threshold = "inf"', "must be a valid number, got 'inf'"),
    ("[filter]\nmax_ops = inf", "filter.max_ops must be a finite number, got inf"),
    ('[method]\nname = "partial"', "'on_policy', 'partial_rollout' or 'rollverify', got 'partial'"),
    ("[switching]\nthreshold = 50", "switching.threshold must be less than or equal to 1, got 50"),
    ("[rollout]\noversampling = 0.5", "rollout.oversampling must be greater than or equal to 1"),
    ("[prepare]\nhead_dim = 48", "prepare.head_dim must be a multiple of 32, got 48"),
    (
        '[run]\nname = "a/b"',
        "run.name must match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$', got 'a/b'",
    ),
    ('[run]\noutput_dir = "a\\u0000b"', "run.output_dir must not hold a NUL character"),
    (
        "[data.test_columns]\nq = 'q'",
        "data.test_columns.q must match pattern '^(prompt|answer|id)$",
    ),
    ('[data.test_columns]\n"a\\nb" = "q"', r"data.test_columns.'a\nb' must match pattern"),
    ("[data.train_hub]\nname = 'x'", "must match pattern '^(subset|split|revision)$', got 'name'"),
    ("[data.train_columns]\nid = 3", "data.train_columns.id must be a valid string, got 3"),
    ("[data.test_hub]\nsplit = ''", "data.test_hub.split must have at least 1 character, got ''"),
    ("[run]\nname = 'a'\nseed 3", "not valid TOML at line 3, column 6: Expected"),
    ("[run]\nseed = 1\nseed = 2", "not valid TOML at line 3"),
    (f"x = {'[' * 4000}{']' * 4000}", "not valid TOML: TOML inline arrays/tables are nested more"),
    (f"x = {'9' * 5000}", "not valid TOML: Exceeds the limit"),
    (f"[engine.options]\nx = {'[' * 390}{']' * 390}", "cannot hold 'x': values are strings"),
]

BAD_LINES = [
    ("--trainin.steps 3", "--trainin.steps: unknown flag 'trainin.steps'; did you mean training.s"),
    ("--training.stpes=3", "--training.stpes: unknown flag 'training.stpes'; did you mean trai"),
    ("--steps 3", "--steps: unknown flag 'steps'; did you mean training.steps?"),
    ("--rollout.lr 3", "--rollout.lr: unknown flag 'rollout.lr'; did you mean training.lr?"),
    ("--rollout.topp 1", "unknown flag 'rollout.topp'; did you mean rollout.top_p?"),
    ("--training 3", "'training' is a table; give one of its keys as --training.KEY"),
    ("--xyz", "--xyz: unknown flag 'xyz'; the tables are run, method"),
    ("--training.no-steps", "--training.no-steps: unknown flag 'training.no_steps'"),
    ("--training.steps 2.5", "--training.steps: training.steps must be a valid integer, got '2.5'"),
    ("--training.steps", "--training.steps: takes one value, got nothing"),
    ("--training.steps 1 2", "--training.steps: takes one value, got '1' '2'"),
    ("--training.lr x", "--training.lr: training.lr must be a valid number, got 'x'"),
    ("--training.lr nan", "--training.lr: training.lr must be a finite number, got nan"),
    ("--verification.token-threshold -inf", "must be greater than 0, got -inf"),
    ("--verification.token-threshold off", "token_threshold must be a valid number, got 'off'"),
    ("--filter.max-ops inf", "filter.max_ops must be a finite number, got inf"),
    ("--verification.window 8", "did you mean switching.window?"),
    ("--training.steps -1", "training.steps must be greater than or equal to 1, got -1"),
    ("--loss.name ppo", "--loss.name: loss.name must be one of 'grpo', 'dr_grpo', 'gspo', "),
    ("--loss.tau-positive 2", "has no effect with loss.name = 'grpo': only 'sapo' reads it"),
    ("--correction.low 0.1", "--correction.low: correction.low has no effect with correction.name"),
    ("--loss.settings {}", "only one of your own reads it; remove it or change loss.name"),
    ("--data.shuffle maybe", "--data.shuffle: data.shuffle must be a valid boolean, got 'maybe'"),
    ("--data.no-shuffle true", "--data.no-shuffle: takes no value, got 'true'"),
    ("--engine.options 3", "--engine.options: engine.options must be a valid table, got 3"),
    ("--engine.options {", "--engine.options: engine.options must be a valid table, got '{'"),
    ("--model.path=\udcff", "model.path 'utf-8' codec can't encode"),
    ("extra", "unexpected argument 'extra'; config files are given as --config FILE"),
    ("-c a.toml", "unexpected argument '-c'"),
    ("--config", "--config: takes a TOML file; repeat --config for another file, got nothing"),
    ("--config a.toml b.toml", "repeat --config for another file, got 'a.toml' 'b.toml'"),
    ("--config=", "--config: takes a TOML file"),
    ("--resume a b", "--resume: takes at most one path, got 'a' 'b'"),
]


def error_of(argv: list[str]) -> str:
    """The one line that refuses a command line."""
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("text", "message"), BAD_FILES, ids=lambda text: text[:40])
def test_bad_file_is_refused(write: Write, text: str, message: str) -> None:
    line = error_of(write(text))
    assert line.startswith("a.toml: ")
    assert message in line
    assert len(line) < 350


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_bad_flag_is_refused(line: str, message: str) -> None:
    assert message in error_of(line.split())


def test_a_table_with_a_line_break_is_no_table() -> None:
    assert "must be a valid table" in error_of(["--engine.options", "{}\nother = 1"])


def test_mistake_in_a_file_is_reported_even_if_a_later_layer_replaces_it(write: Write) -> None:
    line = error_of([*write("[training]\nsteps = 1.5"), "--training.steps", "3"])
    assert line.startswith("a.toml: training.steps must be a valid integer")


def test_mistake_of_python_code_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^settings: training\.steps must be a valid integer"):
        read_config([], {"training": {"steps": "3"}})


def test_missing_file_names_similar_ones(write: Write, tmp_path: Path) -> None:
    write("", "two_ranks.toml")
    (tmp_path / "train_configs" / "methods").mkdir(parents=True)
    (tmp_path / "train_configs" / "two_rank.toml").touch()
    (tmp_path / "train_configs" / "methods" / "on_policy.toml").touch()
    line = error_of(["--config", "two_ranked.toml"])
    assert line.startswith("two_ranked.toml: no such config file; did you mean ")
    assert "two_ranks.toml" in line and "train_configs/two_rank.toml" in line
    for name in ("on_policy.toml", "train_configs/on_policy.toml"):
        cure = "did you mean train_configs/methods/on_policy.toml?"
        assert error_of(["--config", name]).endswith(cure)


def test_missing_file_lists_what_is_there_when_nothing_is_similar(write: Write) -> None:
    cure = "no_folder/zzz.toml: no such config file; there is no TOML file near it"
    assert error_of(["--config", "no_folder/zzz.toml"]) == cure
    write("", "alpha.toml")
    assert error_of(["--config", "zzz.toml"]).endswith("no such config file; there is alpha.toml")


def test_what_is_no_readable_file_is_refused(write: Write, tmp_path: Path) -> None:
    """FAULTS F30: neither a pipe nor an endless device is waited for."""
    write("", "configs.toml")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "x.toml").touch()
    os.mkfifo(tmp_path / "pipe")
    cure = "configs: is a folder, not a config file; there is configs/x.toml"
    assert error_of(["--config", "configs"]) == cure
    for name in ("pipe", "/dev/zero"):
        assert error_of(["--config", name]) == f"{name}: is a pipe or device; give a file"
    assert "configs.toml/b.toml: no such config file" in error_of(
        ["--config", "configs.toml/b.toml"]
    )
    assert "cannot be read (File name too long)" in error_of(["--config", "x" * 5000])


def test_file_that_is_not_utf8_is_refused(write: Write, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b'[run]\nname = "\xff"\n')
    # 6 bytes of "[run]\n" and 8 of 'name = "' precede the bad one
    assert "a.toml: is not UTF-8 text (byte 14)" in error_of(["--config", "a.toml"])
