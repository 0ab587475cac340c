"""A checkpoint whose files are not as they were written is not loaded."""

import json
from pathlib import Path

import pytest
import torch
from support.checkpoint_run import FakeRun, flip_a_bit

from rollverify.checkpoint.checkpoint import DIGEST_FILE
from rollverify.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a checkpoint of step 1."""
    FakeRun(tmp_path / "checkpoints").checkpoint.save(1)
    return tmp_path / "checkpoints" / "step-1"


def test_every_file_but_the_ranks_own_has_a_digest(saved):
    digests = json.loads((saved / DIGEST_FILE).read_text())
    files = {file.name for file in saved.iterdir()} - {DIGEST_FILE, "rank-0.json"}
    assert set(digests) == files == {".metadata", "__0_0.distcp"}
    assert all(len(digest) == 32 for digest in digests.values())  # 128 bits


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_flipped_bit_is_refused_before_anything_is_overwritten(saved, name):
    flip_a_bit(saved / name)
    run = FakeRun(saved.parent)
    before = run.model.weight.clone()
    message = rf"{name} is not as it was written .*; delete {saved} to resume from the checkpoint"
    with pytest.raises(CheckpointError, match=message) as caught:
        run.checkpoint.load_latest(100)
    assert torch.equal(run.model.weight, before) and run.own == {}
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(saved):
    (saved / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp cannot be read \(No such file"):
        FakeRun(saved.parent).checkpoint.load_latest(100)


def test_a_damaged_list_of_digests_is_refused(saved):
    (saved / DIGEST_FILE).write_text('{".metadata": "12')
    with pytest.raises(CheckpointError, match=r"digests\.json is damaged .*; delete .*step-1 to"):
        FakeRun(saved.parent).checkpoint.load_latest(100)


def test_a_checkpoint_without_digests_is_loaded_and_that_is_said(saved, caplog):
    """What a kill leaves that comes between the last file and the digests."""
    (saved / DIGEST_FILE).unlink()
    assert FakeRun(saved.parent).checkpoint.load_latest(100) == 1
    assert f"{saved} has no digests.json, so its data are not checked" in caplog.text


def test_the_digests_hold_when_the_ranks_own_part_is_replaced(saved):
    run = FakeRun(saved.parent)
    run.own = {"tokens": 9}
    run.checkpoint.save_in_flight(1)
    resumed = FakeRun(saved.parent)
    assert resumed.checkpoint.load_latest(100) == 1 and resumed.own == {"tokens": 9}
