"""Arms x seeds -> runs."""

from pathlib import Path

import pytest
from unit.study.folders import study

from rollverify.errors import ConfigError
from rollverify.study.plan import changed_by, narrowed, plan_runs

ROOT = Path("out")


def test_a_seed_is_a_whole_comparison_before_the_next_begins():
    runs = plan_runs(study(), ROOT)
    assert [run.name for run in runs] == [
        f"{arm}, seed {seed}" for seed in (0, 1) for arm in ("on_policy", "rollverify")
    ]
    assert runs[3].place == Path("out/small/rollverify/seed-1")
    named = runs[2].config.run
    assert (named.name, named.seed) == ("on_policy", 1)
    assert named.output_dir == "out/small/on_policy/seed-1"


def test_settings_of_every_kind_reach_the_config():
    settings = {
        "verification": {"token_threshold": float("inf"), "measure": False, "against": "anchor"},
        "engine": {"options": {"block_size": 16}},
        "training": {"lr": 1e-5},
    }
    config = plan_runs(study(settings=settings), ROOT)[1].config
    assert config.verification.token_threshold == float("inf")
    assert config.verification.measure is False and config.verification.against == "anchor"
    assert config.engine.options == {"block_size": 16} and config.training.lr == 1e-5


def test_runs_of_another_study_are_used():
    arms = [{"name": "on_policy", "runs_of": "large"}]
    assert plan_runs(study(arms=arms), ROOT)[0].place == Path("out/large/on_policy/seed-0")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"training": {"stps": 3}}, r"arm on_policy: settings: .*stps.*steps"),
        ({"training": {"steps": "3"}}, r"arm on_policy: settings: .*training\.steps"),
    ],
)
def test_a_wrong_setting_names_the_arm(settings, message):
    arms = [{"name": "on_policy", "settings": settings}]
    with pytest.raises(ConfigError, match=message):
        plan_runs(study(arms=arms), ROOT)


def test_a_study_wide_setting_cannot_hide_what_a_file_of_the_arm_says():
    file = "train_configs/methods/on_policy.toml"
    arms = [{"name": "on_policy", "config_files": [file]}]
    common = {"method": {"name": "rollverify"}}
    with pytest.raises(ConfigError, match=r"method\.name is set by .*on_policy\.toml"):
        plan_runs(study(arms=arms, settings=common), ROOT)
    arms[0]["settings"] = common
    assert plan_runs(study(arms=arms, settings=common), ROOT)[0].config.method.name == "rollverify"


def test_a_study_can_be_narrowed():
    made = narrowed(study(), ["rollverify"], [1])
    assert [run.name for run in plan_runs(made, ROOT)] == ["rollverify, seed 1"]
    assert len(plan_runs(narrowed(study(), [], []), ROOT)) == 4
    with pytest.raises(ConfigError, match="study small has no arm or seed rollverfy, 7"):
        narrowed(study(), ["rollverfy"], [7])


def test_what_an_arm_changes_against_another():
    made = study()
    on_policy, rollverify = made.arms
    assert changed_by(made, rollverify, on_policy) == ['method.name: "on_policy" -> "rollverify"']
    assert changed_by(made, on_policy, on_policy) == []
