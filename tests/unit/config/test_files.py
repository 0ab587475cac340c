"""Reading one TOML file: every error names the file, the key and the cure."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from rollverify.config.files import default_config_file, parse_table, read_values
from rollverify.errors import ConfigError

Write = Callable[..., list[str]]

BAD_DOCUMENTS = [
    # CF01: unknown key, with its table and the near name
    ("[rollout]\ngroup_siz = 4", "unknown key 'rollout.group_siz'; did you mean 'group_size'?"),
    ("[loss]\nclip = 0.1", "unknown key 'loss.clip'; did you mean 'clip_low'?"),
    ("[rollout]\nlr = 1e-3", "unknown key 'rollout.lr'; 'lr' belongs to [training]"),
    ("[method]\nzzz = 1", "unknown key 'method.zzz'; the keys of [method] are name"),
    ("[trainin]\nsteps = 1", "unknown table 'trainin'; did you mean [training]?"),
    ("[verify]\nd_ss = 0.01", "unknown table 'verify'; did you mean [verification]?"),
    ("steps = 1", "unknown table 'steps'; 'steps' belongs to [training]"),
    ("[xyz]", "unknown table 'xyz'; the tables are run, method, verification"),
    ("training = 5", "'training' must be a table, got int 5; write it as [training]"),
    ("[[training]]\nsteps = 1", "'training' must be a table, got list"),
    # CF03: wrong types
    ('[training]\nlr = "1e-6"', "'training.lr' must be float, got str '1e-6'"),
    ("[rollout]\ngroup_size = 2.5", "'rollout.group_size' must be int, got float 2.5"),
    ('[data]\nshuffle = "false"', "'data.shuffle' must be bool, got str 'false'"),
    ("[data]\nshuffle = 0", "'data.shuffle' must be bool, got int 0"),
    ("[training]\nsteps = true", "'training.steps' must be int, got bool True"),
    ("[training]\nlr = true", "'training.lr' must be float, got bool True"),
    ("[run]\nname = 3", "'run.name' must be str, got int 3"),
    ("[engine]\noptions = 3", "'engine.options' must be a table, got int 3"),
    ("[training.steps]\na = 1", "'training.steps' must be int, got dict {'a': 1}"),
    ('[loss]\nname = "ppo"', "'loss.name' must be one of ['grpo', 'dr_grpo', 'gspo', "),
    ("[rollout]\ntop_p = 0", "rollout.top_p must be > 0 and <= 1, got 0.0"),
    ("[loss]\nclip_low = -1.0", "loss.clip_low must be > 0 and <= 1, got -1.0"),
    ("[training]\nlr = nan", "training.lr must be finite and >= 0, got nan"),
    ("[training]\nlr = inf", "training.lr must be finite and >= 0, got inf"),
    (
        "[verification]\ntoken_threshold = nan",
        "verification.token_threshold must be > 0, or inf, got nan",
    ),
    ("[verification]\ntoken_threshold = -inf", "must be > 0, or inf, got -inf"),
    ("[verification]\nsegment_threshold = 0", "must be > 0, or inf, got 0.0"),
    (
        '[verification]\nsegment_threshold = "inf"',
        "must be float, got str 'inf'; write inf without quotes",
    ),
    ('[filter]\nmax_ops = "inf"', "'filter.max_ops' must be float, got str 'inf'"),
    ("[filter]\nmax_ops = inf", "filter.max_ops must be finite and > 0, got inf"),
    (
        '[method]\nname = "partial"',
        "must be one of ['on_policy', 'partial_rollout', 'rollverify'], got 'partial'",
    ),
    ("[switching]\nthreshold = 50", "switching.threshold must be >= 0 and <= 1, got 50.0"),
    ("[rollout]\noversampling = 0.5", "rollout.oversampling must be >= 1, got 0.5"),
    ("[method]\nwindow = 8", "unknown key 'method.window'; 'window' belongs to [switching]"),
    ("[parallelism]\ndata_parallel_shard = 0", "must be >= 1, or -1, got 0"),
    ("[run]\nname = 'a'\nseed 3", "not valid TOML at line 3, column 6"),
    ("[run]\nseed = 1\nseed = 2", "not valid TOML at line 3"),
]


@pytest.mark.parametrize(("text", "message"), BAD_DOCUMENTS)
def test_bad_document_is_refused(write: Write, text: str, message: str) -> None:
    """CF01 and CF03 among others."""
    write(text)
    with pytest.raises(ConfigError) as caught:
        read_values("a.toml")
    assert str(caught.value).startswith("a.toml: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_come_by_dotted_key(write: Write) -> None:
    write("[training]\nlr = 1\n[engine.options]\nblock_size = 16")
    assert read_values("a.toml") == {"training.lr": 1.0, "engine.options": {"block_size": 16}}


def test_infinity_is_read_where_it_is_allowed(write: Write) -> None:
    write("[verification]\nsegment_threshold = inf\ntoken_threshold = +inf")
    values = read_values("a.toml")
    assert values["verification.segment_threshold"] == math.inf
    assert values["verification.token_threshold"] == math.inf


def test_empty_file_and_byte_order_mark_are_accepted(write: Write) -> None:
    write("")
    write("\ufeff[run]\nseed = 3", "b.toml")
    assert read_values("a.toml") == {}
    assert read_values("b.toml") == {"run.seed": 3}


def test_missing_file_names_similar_ones(write: Write, tmp_path: Path) -> None:
    write("", "two_ranks.toml")
    (tmp_path / "train_configs").mkdir()
    (tmp_path / "train_configs" / "two_rank.toml").touch()
    with pytest.raises(ConfigError) as caught:
        read_values("two_ranked.toml")
    message = str(caught.value)
    assert message.startswith("two_ranked.toml: no such config file; did you mean ")
    assert "two_ranks.toml" in message and "train_configs/two_rank.toml" in message


def test_missing_file_is_looked_for_in_the_folder_of_methods(write: Write, tmp_path: Path) -> None:
    (tmp_path / "train_configs" / "methods").mkdir(parents=True)
    (tmp_path / "train_configs" / "methods" / "on_policy.toml").touch()
    for name in ("on_policy.toml", "train_configs/on_policy.toml"):
        with pytest.raises(
            ConfigError, match=r"did you mean train_configs/methods/on_policy\.toml"
        ):
            read_values(name)


def test_missing_file_lists_what_is_there_when_nothing_is_similar(write: Write) -> None:
    write("", "alpha.toml")
    with pytest.raises(ConfigError, match=r"no such config file; there is alpha\.toml$"):
        read_values("zzz.toml")


def test_missing_file_in_an_empty_folder(write: Write) -> None:
    with pytest.raises(ConfigError, match="no such config file; there is no TOML file near it"):
        read_values("no_folder/zzz.toml")


def test_folder_given_as_file_lists_its_files(write: Write, tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "x.toml").touch()
    with pytest.raises(ConfigError, match=r"configs: is a folder.*there is configs/x\.toml"):
        read_values("configs")


def test_file_below_a_file_is_one_line(write: Write) -> None:
    write("")
    with pytest.raises(ConfigError, match=r"^a\.toml/b\.toml: cannot be read \(Not a directory\)"):
        read_values("a.toml/b.toml")


def test_file_that_is_not_utf8_is_refused(write: Write, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b'[run]\nname = "\xff"\n')
    # 6 bytes of "[run]\n" and 8 of 'name = "' precede the bad one
    with pytest.raises(ConfigError, match=r"a\.toml: is not UTF-8 text \(byte 14\)"):
        read_values("a.toml")


def test_default_file_is_found_from_another_folder(write: Write) -> None:
    assert Path(default_config_file()).parts[-2:] == ("train_configs", "default.toml")


def test_default_file_of_the_current_folder_comes_first(write: Write, tmp_path: Path) -> None:
    (tmp_path / "train_configs").mkdir()
    (tmp_path / "train_configs" / "default.toml").touch()
    assert default_config_file() == "train_configs/default.toml"


@pytest.mark.parametrize("text", ["3", "{", "{}\nother = 1", "", "[1]"])
def test_table_flag_that_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^'engine\.options' must be a table such as"):
        parse_table("engine.options", text)
