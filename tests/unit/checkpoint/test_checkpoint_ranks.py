"""The part of a checkpoint that only one rank holds: when it is written, read and given up."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoint_run import FakeRun
from unit.checkpoint import checkpoint_worker

from rollverify.checkpoint.checkpoint import COMPLETE_FILE, complete_steps
from rollverify.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path, process_group: None) -> Path:
    return tmp_path / "checkpoints"


def test_a_resumed_run_gets_its_own_part_back(folder):
    """DC03: what is in flight is part of the checkpoint."""
    first = FakeRun(folder)
    first.own = {"unfinished": [4, 7]}
    first.checkpoint.save(3)
    second = FakeRun(folder)
    assert second.checkpoint.load_latest(100) == 3
    assert second.own == {"unfinished": [4, 7]}


def test_the_own_part_is_written_before_the_checkpoint_is_complete(folder):
    run = FakeRun(folder)
    seen = []
    run.save_rank = lambda path: seen.append((path.name, path.is_dir(), complete_steps(folder)))
    run.checkpoint.save(5)
    assert seen == [("step-5", True, [])]
    assert complete_steps(folder) == [5]


def test_the_own_part_is_loaded_after_everything_else(folder):
    first = FakeRun(folder)
    first.loop["drawn"] = 96
    first.checkpoint.save(1)
    second = FakeRun(folder)
    seen = []
    second.load_rank = lambda path: seen.append(
        (path.name, second.loop["drawn"], torch.equal(second.model.weight, first.model.weight))
    )
    second.checkpoint.load_latest(100)
    assert seen == [("step-1", 96, True)]


def test_a_kill_between_the_own_part_and_the_rest_resumes_from_the_step_before(folder):
    run = FakeRun(folder)
    run.own = {"step": 1}
    run.checkpoint.save(1)
    run.own = {"step": 2}

    def killed(curr_step: int, last_step: bool = False) -> bool:
        raise KeyboardInterrupt

    run.checkpointer.save = killed
    with pytest.raises(KeyboardInterrupt):
        run.checkpoint.save(2)
    assert (folder / "step-2" / "rank-0.json").exists()
    second = FakeRun(folder)
    assert second.checkpoint.load_latest(100) == 1
    assert second.own == {"step": 1}


def test_parts_of_ranks_that_are_no_more_are_removed_from_a_step_that_is_written_again(folder):
    left = folder / "step-4" / "rank-7.json"
    left.parent.mkdir(parents=True)
    left.write_text("{}")
    FakeRun(folder).checkpoint.save(4)
    assert not left.exists()
    assert (folder / "step-4" / "rank-0.json").exists()


def test_a_complete_checkpoint_of_the_same_step_is_left_as_it_is(folder):
    """A run stopped right after it was resumed, perhaps with fewer ranks."""
    first = FakeRun(folder, rank=0)
    first.own = {"of": "two ranks"}
    first.checkpoint.save(1)
    (folder / "step-1" / "rank-1.json").write_text("{}")
    before = {file: file.read_bytes() for file in (folder / "step-1").iterdir()}
    second = FakeRun(folder)
    second.own = {"of": "one rank"}
    second.checkpoint.save(1)
    assert {file: file.read_bytes() for file in (folder / "step-1").iterdir()} == before


def test_what_is_in_flight_replaces_the_own_part_of_a_complete_checkpoint(folder):
    """A rollout engine gave up after step 3, which was saved already."""
    run = FakeRun(folder)
    run.own = {"tokens": 5}
    run.checkpoint.save(3)
    run.own = {"tokens": 9}
    run.checkpoint.save_in_flight(3)
    resumed = FakeRun(folder)
    assert resumed.checkpoint.load_latest(100) == 3 and resumed.own == {"tokens": 9}


def test_what_is_in_flight_is_saved_with_a_step_that_was_not(folder):
    run = FakeRun(folder)
    run.own = {"tokens": 9}
    run.checkpoint.save_in_flight(4)
    resumed = FakeRun(folder)
    assert resumed.checkpoint.load_latest(100) == 4 and resumed.own == {"tokens": 9}


def test_a_full_disk_under_the_own_part_is_a_user_error(folder):
    run = FakeRun(folder)
    run.checkpoint.save(1)

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run.save_rank = full
    with pytest.raises(CheckpointError, match=r"\(No space left on device\); free space or choose"):
        run.checkpoint.save(2)
    assert not (folder / "step-2" / COMPLETE_FILE).exists()


def test_a_fault_of_the_program_is_not_taken_for_one_of_the_user(folder):
    run = FakeRun(folder)

    def broken(path: Path) -> None:
        raise TypeError("not serializable")

    run.save_rank = broken
    with pytest.raises(TypeError, match="not serializable"):
        run.checkpoint.save(1)


@pytest.fixture(scope="module")
def of_two_ranks(run_gloo_workers) -> tuple[Path, list[dict[str, Any]]]:
    """(folder, what each rank saw)."""
    folder = run_gloo_workers(checkpoint_worker.main, 2)
    return folder, [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


def test_a_failure_of_one_rank_ends_all_of_them(of_two_ranks):
    """A rank that waited for the failed one in a collective would time out after 20 s."""
    folder, ranks = of_two_ranks
    full = f"{folder}/checkpoints cannot be written (No space left on device); free space or "
    full += "choose another run.output_dir"
    assert [rank["save"] for rank in ranks] == [
        ["CheckpointError", f"rank 1: {full}"],
        ["CheckpointError", full],
    ]
    damaged = "step-1/rank-1 is damaged; delete it"
    assert [rank["load"] for rank in ranks] == [
        ["CheckpointError", f"rank 1: {damaged}"],
        ["CheckpointError", damaged],
    ]
    assert [(rank["step"], rank["own"]["rank"]) for rank in ranks] == [(1, 0), (1, 1)]


def test_each_ranks_files_are_checked_and_every_rank_learns_of_a_flipped_bit(of_two_ranks):
    """Of three files rank 0 checks the first and the third, which rank 1 has written."""
    folder, ranks = of_two_ranks
    path = folder / "checkpoints" / "step-1"
    assert [rank["digests"] for rank in ranks] == [
        [".metadata", "__0_0.distcp", "__1_0.distcp"]
    ] * 2
    text = f"{path}/__1_0.distcp is not as it was written (its digest differs); delete {path} to "
    text += "resume from the checkpoint before"
    assert [rank["flipped"] for rank in ranks] == [
        ["CheckpointError", text],
        ["CheckpointError", f"rank 0: {text}"],
    ]
