"""The studies of the repository: every arm loads, and each stands for what it says."""

import itertools
from pathlib import Path

import pytest

from rollverify.config.dump import diff
from rollverify.config.rules import check_world_size
from rollverify.study.plan import PlannedRun, plan_runs
from rollverify.study.study_file import read_study

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted((ROOT / "train_configs" / "studies").glob("*.toml"))
README = (ROOT / "train_configs" / "studies" / "README.md").read_text(encoding="utf-8")


def runs_of(name: str) -> dict[str, PlannedRun]:
    """The runs of the first seed by arm."""
    study = read_study(ROOT / "train_configs" / "studies" / f"{name}.toml")
    runs = plan_runs(study, Path("studies"))
    return {run.arm: run for run in runs if run.seed == study.seeds[0]}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_arm_loads_and_is_like_no_other(file):
    runs = runs_of(file.stem)
    for run in runs.values():
        assert check_world_size(run.config, 1) == 1
        assert run.config.evaluation.enable
        in_flight = run.config.rollout.prompts_per_step * run.config.rollout.group_size
        if run.config.method.name != "on_policy":
            in_flight *= run.config.rollout.oversampling
        assert in_flight <= run.config.engine.max_num_seqs, run.name
    for first, second in itertools.combinations(runs.values(), 2):
        changed = diff(first.config, second.config)
        assert not all(line.startswith("run.") for line in changed), (first.name, second.name)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_study_is_in_the_readme(file):
    assert f"`{file.name}`" in README


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_runs_taken_from_another_study_are_the_very_same(file):
    for arm, run in runs_of(file.stem).items():
        owner = run.place.parts[1]
        if owner != file.stem:
            assert runs_of(owner)[arm].config == run.config


def test_the_headline_runs_every_method_and_naive_rollouts_in_every_form():
    configs = {arm: run.config for arm, run in runs_of("headline").items()}
    naive = [c for c in configs.values() if c.method.name == "partial_rollout"]
    assert {c.method.name for c in configs.values()} == {
        "on_policy",
        "partial_rollout",
        "rollverify",
    }
    assert {(c.correction.name, c.loss.denominator) for c in naive} == {
        ("none", "anchor_now"),
        ("truncated", "anchor_now"),
        ("none", "behavior"),
    }


def test_the_headline_and_the_ablation_have_three_seeds():
    for name in ("headline", "ablation"):
        assert read_study(ROOT / "train_configs" / "studies" / f"{name}.toml").seeds == [0, 1, 2]
