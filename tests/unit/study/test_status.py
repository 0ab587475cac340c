"""How far runs are, and the time that is left."""

import os

import pytest
from unit.study.folders import STEPS, checkpoint, own, study, write_run

from rollverify.errors import ConfigError
from rollverify.study.plan import plan_runs
from rollverify.study.status import (
    START_UP_S,
    Progress,
    remaining_s,
    status_of,
    step_seconds,
)


@pytest.fixture
def run(tmp_path):
    """The run of arm rollverify with seed 1."""
    return plan_runs(study(), tmp_path)[3]


def test_a_run_without_a_folder_is_not_started(run):
    status = status_of(run)
    assert (status.progress, status.folder, status.last_step) == (Progress.ABSENT, None, 0)


def test_a_run_is_complete_with_its_last_step_and_the_final_evaluation(run):
    folder = write_run(run.place / "a", own(run))
    status = status_of(run)
    assert (status.progress, status.folder, status.last_step) == (Progress.COMPLETE, folder, STEPS)
    assert status.step_s == 5.5


@pytest.mark.parametrize("lacking", [{"has_final": False}, {"num_steps": 2}])
def test_a_run_that_lacks_its_end_goes_on_from_its_checkpoint(run, lacking):
    folder = write_run(run.place / "a", own(run), **lacking)
    checkpoint(folder, 1)
    assert status_of(run).progress is Progress.RESUMABLE


def test_a_step_that_is_not_logged_makes_a_run_incomplete(run):
    folder = write_run(run.place / "a", own(run))
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:2] + lines[3:]))
    assert status_of(run).progress is Progress.ABSENT


def test_a_checkpoint_without_its_last_file_does_not_count(run):
    folder = write_run(run.place / "a", own(run), num_steps=2, has_final=False)
    checkpoint(folder, 1, name="part")
    assert status_of(run).progress is Progress.ABSENT


def test_a_torn_last_line_is_no_error(run):
    folder = write_run(run.place / "a", own(run), num_steps=2, has_final=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    assert status_of(run).last_step == 2


def test_a_complete_folder_counts_before_newer_ones(run):
    whole = write_run(run.place / "b", own(run))
    newer = write_run(run.place / "a", own(run), num_steps=2, has_final=False)
    checkpoint(newer, 2)
    os.utime(whole, (1, 1))
    assert status_of(run).folder == whole


def test_the_newest_of_two_interrupted_folders_goes_on(run):
    for name, age in (("b", 1), ("a", 2)):
        folder = write_run(run.place / name, own(run), num_steps=2, has_final=False)
        checkpoint(folder, 2)
        os.utime(folder, (age, age))
    assert status_of(run).folder == run.place / "a"


def test_a_folder_made_with_other_settings_is_refused_by_name(run):
    write_run(run.place / "a", own(run, **{"training.lr": 0.25}))
    with pytest.raises(ConfigError, match=r"seed-1/a was made with .*training\.lr: 0\.25 -> "):
        status_of(run)


def test_where_a_run_lies_may_change(run):
    write_run(run.place / "a", own(run, **{"run.output_dir": "elsewhere"}))
    assert status_of(run).progress is Progress.COMPLETE


def test_time_left_counts_the_steps_left_and_a_start(run):
    absent = status_of(run)
    assert remaining_s(run, absent, 5.0) == START_UP_S + 3 * 5.0
    folder = write_run(run.place / "a", own(run), num_steps=2, has_final=False)
    checkpoint(folder, 2)
    assert remaining_s(run, status_of(run), 5.0) == START_UP_S + 1 * 5.0


def test_nothing_is_left_of_a_complete_run(run):
    write_run(run.place / "a", own(run))
    assert remaining_s(run, status_of(run), 5.0) == 0.0


def test_an_arm_that_was_measured_is_not_guessed(run):
    runs = [*plan_runs(study(), run.place.parents[2])]
    statuses = [status_of(one) for one in runs]
    # 2 minutes for 3 steps
    assert step_seconds(runs, statuses, 2.0) == {"on_policy": 40.0, "rollverify": 40.0}
    write_run(run.place / "a", own(run))
    statuses = [status_of(one) for one in runs]
    assert step_seconds(runs, statuses, 2.0) == {"on_policy": 5.5, "rollverify": 5.5}
