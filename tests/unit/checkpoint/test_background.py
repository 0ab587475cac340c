"""Checkpoints that are written beside the next steps."""

import threading
from pathlib import Path

import pytest
import torch
from support.checkpoint_run import FakeRun

from rollverify.checkpoint.checkpoint import DIGEST_FILE, complete_steps
from rollverify.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writing waits until this is set."""
    from torch.distributed.checkpoint import FileSystemWriter

    event, write = threading.Event(), FileSystemWriter.write_data

    def held_write(self, plan, planner):
        event.wait(30)
        return write(self, plan, planner)

    monkeypatch.setattr(FileSystemWriter, "write_data", held_write)
    return event


def test_the_step_goes_on_while_the_copy_is_written(folder: Path, held: threading.Event) -> None:
    """What the next step changes is not in the checkpoint."""
    run = FakeRun(folder, in_background=True)
    before = run.model.weight.detach().clone()
    run.loop["drawn"] = 5
    run.checkpoint.save(1)
    assert complete_steps(folder) == []
    with torch.no_grad():
        run.model.weight.add_(1.0)
    run.loop["drawn"] = 6
    held.set()
    run.checkpoint.finish()
    assert complete_steps(folder) == [1] and (folder / "step-1" / DIGEST_FILE).is_file()
    other = FakeRun(folder)
    assert other.checkpoint.load_latest(100) == 1
    assert torch.equal(other.model.weight, before) and other.loop["drawn"] == 5


def test_the_next_save_waits_and_the_old_ones_go(folder: Path) -> None:
    run = FakeRun(folder, keep=1, in_background=True)
    for step in (1, 2, 3):
        run.checkpoint.save(step)
        assert step - 1 in [0, *complete_steps(folder)]
    run.checkpoint.finish()
    assert complete_steps(folder) == [3]
    run.checkpoint.finish()  # Nothing is left to do.


def test_a_kill_while_it_is_written_leaves_the_one_before(
    folder: Path, held: threading.Event
) -> None:
    held.set()
    run = FakeRun(folder, in_background=True)
    run.checkpoint.save(1)
    run.checkpoint.finish()
    held.clear()
    run.checkpoint.save(2)
    assert FakeRun(folder).checkpoint.load_latest(100) == 1  # As a new process would find it.
    held.set()
    run.checkpoint.finish()
    assert FakeRun(folder).checkpoint.load_latest(100) == 2


def test_a_failure_is_told_by_the_next_save(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint import FileSystemWriter

    def full(self, plan, planner):
        raise OSError(28, "No space left on device")

    run = FakeRun(folder, in_background=True)
    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", full)
        run.checkpoint.save(1)
        with pytest.raises(CheckpointError, match=r"cannot be written \(No space left"):
            run.checkpoint.save(2)
    assert complete_steps(folder) == []


def test_what_is_in_flight_is_complete_when_it_returns(folder: Path) -> None:
    run = FakeRun(folder, in_background=True)
    run.checkpoint.save_in_flight(4)
    assert (folder / "step-4" / DIGEST_FILE).is_file()
