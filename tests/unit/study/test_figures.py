"""Figures of one run, each by hand from the three equal steps of `folders.STEP`."""

import pytest
from unit.study.folders import evaluation, write_run

from rollverify.study.figures import (
    FIGURES,
    accuracy_points,
    figures_of,
    num_problems,
    phases,
    slot_steps,
    work_of,
)
from rollverify.study.records import read_run


def record(tmp_path, settings=None, **changes):
    return read_run("a", 0, write_run(tmp_path / "run", settings, **changes))


EXPECTED = {
    "mean_at_k": 0.75,
    "greedy": 0.5,
    "truncated": 0.125,
    "reward": 0.5,
    "entropy": 0.2,
    "ops_mean": 0.01,
    "ops_peak": 0.01,
    "staleness_mean": 1.0,
    "acceptance": 0.75,
    "cuts_segment": 1,
    "cuts_token": 1,
    "switched_at": None,
    "decode_steps": 30,
    "slot_steps": 3 * 20,  # 60 idle slots are 75 % of 80
    "idle_slot_steps": 180,
    "tokens_generated": 60,
    "tokens_trained": 40,
    "tokens_regenerated": 5 + 2 + 1,
    "tokens_prefilled": 3 * 12,
    "scoring_tokens": 3 * 2 * 20,  # two passes
    "generation_s": 3 * (2.5 - 0.25 - 0.25),
    "train_s": 3.0,
    "scoring_s": 3 * 0.5,
    "sync_s": 3 * (1.25 - 0.75 - 0.25),
    "evaluation_s": 3 * 0.75,
    "method_s": 3 * (2.5 + 1 + 0.5 + 0.25),
}


def test_figures_by_hand(tmp_path):
    found = figures_of(record(tmp_path))
    assert found == pytest.approx(EXPECTED)
    assert list(found) == list(FIGURES)


def test_scoring_that_only_measures_is_no_cost_of_the_method(tmp_path):
    found = figures_of(record(tmp_path, {"method.name": "partial_rollout"}))
    assert found["method_s"] == pytest.approx(3 * (4.25 - 0.5))
    assert found["cuts_segment"] is None


def test_scoring_that_a_filter_needs_is_a_cost(tmp_path):
    found = figures_of(record(tmp_path, {"method.name": "partial_rollout", "filter.name": "ops"}))
    assert found["method_s"] == pytest.approx(EXPECTED["method_s"])


def known(made):
    return {name for name, value in figures_of(made).items() if value is not None}


def test_an_incomplete_run_has_no_totals(tmp_path):
    made = record(tmp_path, num_steps=2, has_final=False)
    assert known(made) == {"cuts_segment", "cuts_token"}
    assert len(phases(made)) == 2 and work_of(made) is None


def test_a_missing_value_leaves_only_its_figures_out(tmp_path):
    assert FIGURES.keys() - known(record(tmp_path, time__train_s=None)) == {
        "train_s",
        "method_s",
        "switched_at",
    }


@pytest.mark.parametrize(
    ("settings", "metrics", "slots"),
    [
        ({}, {}, 16),  # oversampling 2 of 4 * 2
        ({"engine.max_num_seqs": 12}, {}, 12),
        ({"method.name": "on_policy"}, {}, 8),
        ({}, {"switching__is_on_policy": 1.0}, 8),
    ],
)
def test_a_phase_without_idle_slots_takes_them_from_the_config(tmp_path, settings, metrics, slots):
    full = {"rollout__engine_busy_frac": 1.0, "rollout__idle_slot_steps": 0.0}
    made = record(tmp_path, settings, **full, **metrics)
    assert list(slot_steps(made)) == [10 * slots] * 3
    made.config.clear()
    assert slot_steps(made).isna().all()


def test_steps_without_unfinished_responses_have_no_acceptance(tmp_path):
    empty = {"verification/acceptance_rate": 1.0, "verification/tokens_checked": 0.0}
    assert figures_of(record(tmp_path, later={1: empty}))["acceptance"] == 0.75


def test_the_first_on_policy_step_is_that_of_the_switch(tmp_path):
    later = {2: {"switching/is_on_policy": 1.0}, 3: {"switching/is_on_policy": 1.0}}
    made = record(tmp_path, later=later, switching__is_on_policy=0.0)
    assert figures_of(made)["switched_at"] == 2


def test_accuracy_over_the_cost_so_far(tmp_path):
    made = record(tmp_path, later={2: evaluation(0.5)})
    # a step costs 10 + 0.5 * 20 in units of c0
    assert accuracy_points(made, 0.5) == [(0, 0.25), (40, 0.5), (60, 0.75)]
    assert accuracy_points(made, None) == [(0, 0.25), (8.5, 0.5), (12.75, 0.75)]


def test_problems_are_those_that_exist(tmp_path):
    made = record(tmp_path, {"prepare.num_test_problems": 64})
    assert num_problems(made) == 64
    own = {"data.train": "x", "data.test": "y", "prepare.num_test_problems": 64}
    assert num_problems(read_run("a", 0, write_run(tmp_path / "own", own))) == 100
