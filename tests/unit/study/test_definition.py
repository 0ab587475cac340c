"""Study files: what they say, and what is refused."""

import pytest
from unit.study.folders import study

from rollverify.errors import ConfigError
from rollverify.study.definition import read_study

ARM = {"name": "a"}
CLAIM = {"text": "t", "kind": "cheaper", "arm": "on_policy", "other": "rollverify"}


def test_an_arms_own_settings_win_over_those_of_the_study():
    made = study(
        settings={"training": {"steps": 3, "lr": 0.5}},
        baseline="a",
        arms=[{"name": "a", "settings": {"training": {"steps": 9}}}],
    )
    (arm,) = made.arms
    assert arm.settings == {"training.steps": 9, "training.lr": 0.5}
    assert arm.inherited == {"training.lr"}


def test_the_files_of_the_study_come_first():
    made = study(config_files=["x"], baseline="a", arms=[{**ARM, "config_files": ["y", "z"]}])
    assert made.arms[0].config_files == ("x", "y", "z")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": [0]}, "unknown keys seed"),
        ({"seeds": []}, "'seeds' must be a list of whole numbers"),
        ({"seeds": [0, True]}, "'seeds' must be a list of whole numbers"),
        ({"seeds": [1, 1]}, "names a seed twice"),
        ({"baseline": "b"}, "baseline 'b' is not an arm; arms: on_policy, rollverify"),
        ({"arms": [ARM, ARM], "baseline": "a"}, "two arms have the same name"),
        ({"arms": [{}]}, "arm without a name lacks name"),
        ({"arms": [{**ARM, "setings": {}}]}, "arm a has unknown keys setings"),
        ({"arms": [{**ARM, "config_files": "x"}]}, "'config_files' must be a list of strings"),
        ({"settings": {"steps": 3}}, "'steps' must be a table"),
        ({"claims": [{**CLAIM, "kind": "nicer"}]}, "unknown kind of claim 'nicer'"),
        ({"claims": [CLAIM]}, "claim cheaper lacks factor, ratio"),
        (
            {"claims": [{"text": "t", "kind": "ops_order", "arms": ["on_policy", "c"]}]},
            "claim ops_order names no arm of this study: c",
        ),
    ],
)
def test_a_wrong_study_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        study(**changes)


def test_the_file_is_named_in_the_error(tmp_path):
    file = tmp_path / "half.toml"
    file.write_text('question = "?"')
    with pytest.raises(ConfigError, match=r"half\.toml: the study lacks arms, baseline, seeds"):
        read_study(file)
    file.write_text("question = ")
    with pytest.raises(ConfigError, match=r"half\.toml: not valid TOML"):
        read_study(file)
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read \(No such file"):
        read_study(tmp_path / "none.toml")


def test_the_files_name_is_the_studys(tmp_path):
    file = tmp_path / "short.toml"
    file.write_text('question = "?"\nseeds = [4]\nbaseline = "a"\n[[arms]]\nname = "a"\n')
    made = read_study(file)
    assert (made.name, made.seeds, made.arms[0].label) == ("short", (4,), "a")
