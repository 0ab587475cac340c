"""How far runs are, and the time that is left."""

import os

import pytest
from unit.study.folders import checkpoint, drop_line, own, study, write_run

from rollverify.errors import ConfigError
from rollverify.study.plan import plan_runs
from rollverify.study.status import START_UP_S, Progress, RunStatus, seconds_left, status_of


@pytest.fixture
def runs(tmp_path):
    return plan_runs(study(), tmp_path)


@pytest.fixture
def run(runs):
    """The run of arm rollverify with seed 1."""
    return runs[3]


def interrupted(run, name="a", **changes):
    folder = write_run(
        run.place / name, own(run), **{"num_steps": 2, "has_final": False, **changes}
    )
    checkpoint(folder, 2)
    return folder


def test_a_run_is_complete_with_its_last_step_and_the_final_evaluation(run):
    assert status_of(run) == RunStatus(progress=Progress.ABSENT)
    folder = write_run(run.place / "a", own(run))
    expected = RunStatus(progress=Progress.COMPLETE, folder=folder, last_step=3, step_s=5.5)
    assert status_of(run) == expected


@pytest.mark.parametrize("lacking", [{"num_steps": 3}, {"has_final": True}])
def test_a_run_that_lacks_its_end_goes_on_from_its_checkpoint(run, lacking):
    interrupted(run, **lacking)
    assert status_of(run).progress is Progress.RESUMABLE


def test_a_step_that_is_not_logged_makes_a_run_incomplete(run):
    drop_line(write_run(run.place / "a", own(run)) / "metrics.jsonl", 2)
    assert status_of(run).progress is Progress.ABSENT


def test_neither_a_torn_line_nor_a_checkpoint_without_its_last_file_counts(run):
    folder = write_run(run.place / "a", own(run), num_steps=2, has_final=False)
    checkpoint(folder, 1, name="part")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    status = status_of(run)
    assert (status.progress, status.last_step) == (Progress.ABSENT, 2)


def test_a_complete_folder_counts_before_newer_ones(run):
    whole = write_run(run.place / "b", own(run))
    interrupted(run)
    os.utime(whole, (1, 1))
    assert status_of(run).folder == whole


def test_the_newest_of_two_interrupted_folders_goes_on(run):
    for name, age in (("b", 1), ("a", 2)):
        os.utime(interrupted(run, name), (age, age))
    assert status_of(run).folder == run.place / "a"


def test_a_folder_made_with_other_settings_is_refused_by_name_but_it_may_lie_elsewhere(run):
    write_run(run.place / "b", own(run, **{"run.output_dir": "elsewhere"}))
    assert status_of(run).progress is Progress.COMPLETE
    write_run(run.place / "c", own(run, **{"training.lr": 0.25}))
    with pytest.raises(ConfigError, match=r"seed-1/c was made with .*training\.lr: 0\.25 -> "):
        status_of(run)


def test_time_left_counts_the_steps_left_and_a_start(runs):
    # 2 minutes are guessed for 3 steps
    assert seconds_left(runs, 2.0) == [START_UP_S + 3 * 40.0] * 4
    write_run(runs[0].place / "a", own(runs[0]))
    interrupted(runs[3])
    # an arm that was measured is not guessed
    expected = [0.0, START_UP_S + 3 * 5.5, START_UP_S + 3 * 5.5, START_UP_S + 1 * 5.5]
    assert seconds_left(runs, 2.0) == expected
