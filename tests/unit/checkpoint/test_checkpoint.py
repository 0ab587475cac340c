"""Checkpoints through the real distributed checkpoint format, on tiny tensors and one process."""

import errno
from pathlib import Path

import pytest
import torch
from support.checkpoint_run import FakeRun

from rollverify.checkpoint.checkpoint import COMPLETE_FILE, DIGEST_FILE, complete_steps
from rollverify.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def half_written(folder: Path, step: int) -> Path:
    """What a kill inside a save leaves behind: data without `.metadata`."""
    path = folder / f"step-{step}"
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(b"cut off")
    return path


def test_complete_steps_are_those_with_metadata_in_numeric_order(folder):
    assert complete_steps(folder) == []
    for name in ("step-10", "step-9", "step-x", "step-11.tmp", "other"):
        (folder / name).mkdir(parents=True)
        (folder / name / COMPLETE_FILE).touch()
    half_written(folder, 12)
    (folder / "step-13").touch()
    assert complete_steps(folder) == [9, 10]


def test_a_resumed_run_gets_weights_and_loop_values_back(folder):
    """DC01, DC11: what the loop saved is what it goes on from, lists of another length too."""
    first = FakeRun(folder)
    first.loop = {"drawn": 96, "list": [1, 2, 3]}
    first.checkpoint.save(3)
    second = FakeRun(folder)
    second.loop = {"drawn": 0, "list": [7]}
    assert second.checkpoint.load_latest(100) == 3
    assert second.loop == {"drawn": 96, "list": [1, 2, 3]}
    assert torch.equal(second.model.weight, first.model.weight)
    assert torch.equal(second.model.bias, first.model.bias)


def test_the_newest_complete_checkpoint_is_loaded(folder):
    run = FakeRun(folder, keep=5)
    for step in (9, 10):
        run.loop["drawn"] = step
        run.checkpoint.save(step)
    half_written(folder, 11)
    other = FakeRun(folder)
    assert other.checkpoint.load_latest(100) == 10
    assert other.loop["drawn"] == 10


def test_only_the_newest_complete_checkpoints_are_kept(folder):
    run = FakeRun(folder, keep=2)
    for step in range(1, 6):
        run.checkpoint.save(step)
    assert sorted(path.name for path in folder.iterdir()) == ["step-4", "step-5"]


def test_half_written_folders_do_not_count_as_kept_and_are_cleaned_up(folder):
    run = FakeRun(folder, keep=2)
    run.checkpoint.save(1)
    run.checkpoint.save(2)
    half_written(folder, 3)
    run.checkpoint.save(4)
    assert sorted(path.name for path in folder.iterdir()) == ["step-2", "step-4"]


def test_a_half_written_folder_of_the_same_step_is_replaced(folder):
    left = half_written(folder, 4) / "__7_0.distcp"
    left.write_bytes(b"of a rank that is no more")
    run = FakeRun(folder)
    run.checkpoint.save(4)
    assert not left.exists()
    assert FakeRun(folder).checkpoint.load_latest(100) == 4


def test_other_files_in_the_folder_are_left_alone(folder):
    run = FakeRun(folder, keep=1)
    run.checkpoint.save(1)
    (folder / "notes").mkdir()
    run.checkpoint.save(2)
    assert sorted(path.name for path in folder.iterdir()) == ["notes", "step-2"]


def test_only_rank_0_deletes(folder):
    run = FakeRun(folder, keep=1, rank=1)
    for step in (1, 2, 3):
        run.checkpoint.save(step)
    assert complete_steps(folder) == [1, 2, 3]


def test_no_checkpoint_is_an_error_that_says_what_to_do(folder):
    half_written(folder, 1)
    with pytest.raises(CheckpointError, match="no complete checkpoint; start a new run"):
        FakeRun(folder).checkpoint.load_latest(100)


def test_a_run_that_ends_before_the_checkpoint_is_refused(folder):
    FakeRun(folder).checkpoint.save(4)
    with pytest.raises(CheckpointError, match=r"step-4 lies beyond training.steps = 3; .* least 4"):
        FakeRun(folder).checkpoint.load_latest(3)


def test_a_model_of_other_shapes_is_refused_before_anything_is_overwritten(folder):
    FakeRun(folder, width=3).checkpoint.save(1)
    other = FakeRun(folder, width=4)
    before = other.model.weight.clone()
    with pytest.raises(CheckpointError, match=r"weight is \(2, 3\) there and \(2, 4\) in this run"):
        other.checkpoint.load_latest(100)
    assert torch.equal(other.model.weight, before)
    assert other.loop["drawn"] == 0


def test_a_parameter_that_the_checkpoint_lacks_is_named(folder):
    FakeRun(folder).checkpoint.save(1)
    other = FakeRun(folder)
    other.model.register_parameter("extra", torch.nn.Parameter(torch.zeros(5)))
    with pytest.raises(CheckpointError, match=r"extra is missing there and \(5,\) in this run"):
        other.checkpoint.load_latest(100)


def test_another_schema_is_refused(folder, monkeypatch):
    """Schema 1 has no part of the ranks; the loop's values and that part stay as they are."""
    monkeypatch.setattr("rollverify.checkpoint.checkpoint.SCHEMA_VERSION", 1)
    FakeRun(folder).checkpoint.save(1)
    monkeypatch.undo()
    other = FakeRun(folder)
    other.own = {"mine": 1}
    with pytest.raises(CheckpointError, match="has schema 1, this version reads 2; resume with"):
        other.checkpoint.load_latest(100)
    assert (other.loop, other.own) == ({"drawn": 0, "list": []}, {"mine": 1})


def test_damaged_metadata_is_refused_in_one_line(folder):
    run = FakeRun(folder)
    run.checkpoint.save(1)
    (folder / "step-1" / DIGEST_FILE).unlink()
    (folder / "step-1" / COMPLETE_FILE).write_bytes(b"\x80\x04 not a pickle")
    with pytest.raises(CheckpointError, match=r"step-1/\.metadata is damaged") as caught:
        run.checkpoint.load_latest(100)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_damaged_data_is_refused_in_one_line(folder, damage):
    run = FakeRun(folder)
    run.checkpoint.save(1)
    (folder / "step-1" / DIGEST_FILE).unlink()
    (data,) = (folder / "step-1").glob("*.distcp")
    if damage == "cut":
        data.write_bytes(data.read_bytes()[:20])
    else:
        data.unlink()
    with pytest.raises(CheckpointError, match=r"step-1 cannot be read \(.*\); delete it") as caught:
        run.checkpoint.load_latest(100)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_a_user_error(folder):
    def full(curr_step: int, last_step: bool = False) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = FakeRun(folder)
    run.checkpoint.save(1)
    run.checkpointer.save = full
    with pytest.raises(CheckpointError, match=r"\(No space left on device\); free space or choose"):
        run.checkpoint.save(2)
    assert complete_steps(folder) == [1]


def test_a_folder_that_cannot_be_written_is_a_user_error(folder):
    """Raised by the checkpoint library itself, which wraps it in an exception of its own."""
    folder.write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="checkpoints cannot be written") as caught:
        FakeRun(folder).checkpoint.save(1)
    assert "\n" not in str(caught.value)
