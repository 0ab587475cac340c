"""Study files: what they say, and what is refused."""

import pytest
from unit.study.folders import study

from rollverify.errors import ConfigError
from rollverify.study.study_file import read_study

ARM = {"name": "a"}
CLAIM = {"text": "t", "kind": "cheaper", "arm": "on_policy", "other": "rollverify"}
WHOLE = {**CLAIM, "factor": 1.5, "ratio": 0}


def test_an_arms_own_settings_win_over_those_of_the_study():
    own = {"name": "a", "settings": {"training": {"steps": 9}}, "config_files": ["y", "z"]}
    common = {"training": {"steps": 3, "lr": 0.5}}
    made = study(settings=common, config_files=["x"], baseline="a", arms=[own])
    assert made.settings_of(made.arms[0]) == {"training.steps": 9, "training.lr": 0.5}
    assert made.files_of(made.arms[0]) == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": [0]}, "unknown key 'seed'; did you mean 'seeds'?"),
        ({"_name": "x"}, "unknown key '_name'; known: question, seeds, "),
        (
            {"seeds": []},
            "'seeds': list should have at least 1 item after validation, not 0, got []",
        ),
        ({"seeds": [0, True]}, "'seeds.1': input should be a valid integer, got True"),
        ({"seeds": [1, 1]}, "'seeds' names a seed twice: [1, 1]"),
        ({"baseline": "b"}, "baseline 'b' is not an arm; arms: on_policy, rollverify"),
        ({"arms": [ARM, ARM], "baseline": "a"}, "two arms have the same name: a, a"),
        ({"arms": [{}]}, "arm number 1: 'name' is missing"),
        ({"arms": [3]}, "arm number 1: input should be a valid dictionary"),
        ({"arms": [{**ARM, "setings": {}}]}, "arm a: unknown key 'setings'; did you mean 'sett"),
        ({"arms": [{**ARM, "config_files": "x"}]}, "arm a: 'config_files': input should be a val"),
        ({"settings": {"steps": 3}}, "'steps' must be a table, such as training.steps = 3"),
        ({"settings": 3}, "'settings' must be a table"),
        (
            {"claims": [{**CLAIM, "kind": "nicer"}]},
            "claim number 1: unknown kind of claim 'nicer';",
        ),
        (
            {"claims": [{"text": "t"}]},
            "claim number 1: unknown kind of claim None; known: accuracy_b",
        ),
        (
            {"claims": [WHOLE, CLAIM]},
            "claim number 2: 'factor' is missing; claim number 2: 'ratio'",
        ),
        (
            {"claims": [{**WHOLE, "fator": 1}]},
            "claim number 1: unknown key 'fator'; did you mean 'factor'?",
        ),
        ({"claims": [{**WHOLE, "arm": "c"}]}, "claim cheaper names no arm of this study: c"),
    ],
)
def test_a_wrong_study_is_refused_in_one_line(changes, message):
    with pytest.raises(ConfigError) as error:
        study(**changes)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_the_file_is_named_in_the_error(tmp_path):
    file = tmp_path / "half.toml"
    file.write_text('question = "?"')
    with pytest.raises(ConfigError, match=r"half\.toml: 'seeds' is missing; 'baseline' is missing"):
        read_study(file)
    file.write_text("question = ")
    with pytest.raises(ConfigError, match=r"half\.toml: not valid TOML"):
        read_study(file)
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read \(No such file"):
        read_study(tmp_path / "none.toml")


def test_the_files_name_is_the_studys(tmp_path):
    file = tmp_path / "short.toml"
    file.write_text('question = "?"\nseeds = [4]\nbaseline = "a_b"\n[[arms]]\nname = "a_b"\n')
    made = read_study(file)
    assert (made.name, made.seeds, made.arms[0].label) == ("short", [4], "a b")
