"""The rank file: comes back bit for bit, and a damaged one is never taken for a good one."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from support.fakes import trajectory
from tensordict import TensorDict

from rollverify.checkpoint import rank_file
from rollverify.checkpoint.rank_file import load_rank_file, save_rank_file
from rollverify.errors import CheckpointError
from rollverify.rollout.trajectory import (
    FIELDS,
    ROUTING,
    Status,
    append_segment,
    new_trajectory,
    truncate,
)

VALUES = {"counts": {"generated": 12, "cut": 0}, "returned": [[3, 1, 2]], "rate": 0.1, "none": None}


def sample(*segments: tuple[int, list[int]], prompt: int = 2, group: int = 0) -> TensorDict:
    """A trajectory from (version, ids), half of whose anchors are known."""
    made = new_trajectory(
        prompt_ids=range(1, prompt + 1), group_id=group, prompt_index=5, sample_index=1
    )
    for version, ids in segments:
        logprobs = [-0.1 - token / 7 for token in ids]
        append_segment(made, ids, logprobs, policy_version=version, seed=2**62 - 1 - version)
    half = len(made["response_ids"]) // 2
    made["anchor_logprobs"][:half] = -1 / 3
    return made


def samples() -> list[TensorDict]:
    """Lengths 5, 0, 1 with prompts of 2, 1, 3; ids beyond 2**31."""
    return [
        sample((0, [3, 2**40]), (4, [5, 6, 7])),
        sample(prompt=1, group=2**40),
        sample((7, [2]), prompt=3, group=8),
    ]


def assert_equal(found: TensorDict, expected: TensorDict) -> None:
    for key, field in FIELDS.items():
        assert found[key].dtype == field.dtype
        assert torch.equal(found[key].nan_to_num(9), expected[key].nan_to_num(9)), key


def stored(folder: Path) -> Path:
    path = folder / "rank-0.safetensors"
    save_rank_file(path, samples(), VALUES)
    return path


def test_trajectories_and_values_come_back_as_they_were(tmp_path):
    """LP07: ids and log-probs after a save are those before, with the same types."""
    found, values = load_rank_file(stored(tmp_path))
    for one, expected in zip(found, samples(), strict=True):
        assert_equal(one, expected)
    assert values == VALUES


def test_expert_ids_come_back_where_there_are_any(tmp_path):
    """RR09: id 300 too; a response that has not begun has no rows."""
    begun, fresh = samples()[:2]
    begun[ROUTING] = torch.tensor([300, 1, 2, 3, 4, 5]).to(torch.int16).view(6, 1, 1)
    save_rank_file(tmp_path / "f", [fresh, begun, fresh], {})
    found, _ = load_rank_file(tmp_path / "f")
    assert [ROUTING in one for one in found] == [False, True, False]
    assert torch.equal(found[1][ROUTING], begun[ROUTING])
    assert found[1][ROUTING].dtype == torch.int16


def test_a_changed_expert_id_is_noticed(tmp_path):
    """Its bytes belong to the digest."""
    one = samples()[0]
    one[ROUTING] = torch.full((6, 1, 1), 77, dtype=torch.uint8)
    save_rank_file(tmp_path / "f", [one], {})
    data = (tmp_path / "f").read_bytes()
    assert data.count(b"M" * 6) == 1  # chr(77)
    (tmp_path / "f").write_bytes(data.replace(b"M" * 6, b"MMMMMN"))
    with pytest.raises(CheckpointError, match="its digest differs"):
        load_rank_file(tmp_path / "f")


@pytest.mark.parametrize("lengths", [[5], [5, 5], [5, 3], [0], [0, 0, 4]])
def test_lengths_are_kept_whether_they_are_equal_or_not(tmp_path, lengths):
    """TD01: [5], [5, 5] and [5, 3] come back as they are, each a plain tensor."""
    save_rank_file(tmp_path / "f", [trajectory([1], [7] * size) for size in lengths], {})
    found, _ = load_rank_file(tmp_path / "f")
    assert [len(one["response_ids"]) for one in found] == lengths
    assert {type(one["response_ids"]) for one in found} == {torch.Tensor}


def test_no_trajectories_are_legal(tmp_path):
    save_rank_file(tmp_path / "f", [], {"num_streamed": 0})
    assert load_rank_file(tmp_path / "f") == ([], {"num_streamed": 0})


def test_what_comes_back_can_be_changed_and_owns_its_memory(tmp_path):
    path = stored(tmp_path)
    found, _ = load_rank_file(path)
    sizes = [one["response_ids"].untyped_storage().nbytes() for one in found]
    assert sizes == [5 * 8, 0, 1 * 8]
    append_segment(found[0], [9], [-1.0], policy_version=5, seed=1)
    truncate(found[2], 0)
    found[0]["anchor_logprobs"].fill_(0.0)
    again, _ = load_rank_file(path)
    assert_equal(again[0], samples()[0])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"rank-3 is missing; delete its folder to resume"):
        load_rank_file(tmp_path / "rank-3")


def test_a_file_cut_short_anywhere_is_refused(tmp_path):
    path = stored(tmp_path)
    content = path.read_bytes()
    for size in [0, 1, 7, 8, 100, *range(0, len(content), 97), len(content) - 1]:
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"rank-0\.safetensors .*checkpoint before$"):
            load_rank_file(path)


def test_no_flipped_bit_goes_unnoticed(tmp_path):
    """Every byte of the file, one bit each; the message is one line and names the file."""
    path = stored(tmp_path)
    content = path.read_bytes()
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"rank-0\.safetensors ") as caught:
            load_rank_file(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", [*FIELDS, "prompt_lengths", "response_lengths"])
def test_a_flipped_bit_in_any_array_is_refused(tmp_path, key):
    path = stored(tmp_path)
    content = bytearray(path.read_bytes())
    header_size = int.from_bytes(content[:8], "little")
    start, end = json.loads(content[8 : 8 + header_size])[key]["data_offsets"]
    content[8 + header_size + (start + end) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"safetensors is not as it was written \(its digest"):
        load_rank_file(path)


@pytest.mark.parametrize(("old", "new"), [(b"generated", b"generatee"), (b'"I64"', b'"F64"')])
def test_changed_values_and_types_are_refused(tmp_path, old, new):
    path = stored(tmp_path)
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(CheckpointError, match="its digest differs"):
        load_rank_file(path)


def test_another_schema_is_refused_with_both_numbers(tmp_path, monkeypatch):
    path = stored(tmp_path)
    monkeypatch.setattr(rank_file, "SCHEMA_VERSION", 77)
    with pytest.raises(CheckpointError, match=r"safetensors has schema 3, this version reads 77; "):
        load_rank_file(path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "f").write_text('{"schema": "2"}')
    with pytest.raises(CheckpointError, match="f is damaged or cut short"):
        load_rank_file(tmp_path / "f")


def test_an_invalid_trajectory_is_refused_when_it_is_read(tmp_path, monkeypatch):
    broken = samples()
    broken[2]["behavior_logprobs"][0] = float("nan")
    with monkeypatch.context() as unchecked:
        unchecked.setattr(rank_file, "validate_trajectory", lambda one: None)
        save_rank_file(tmp_path / "f", broken, {})
    with pytest.raises(CheckpointError, match="f holds a wrong trajectory: group 8 sample 1: beh"):
        load_rank_file(tmp_path / "f")


def test_an_invalid_trajectory_is_not_written(tmp_path):
    broken = samples()
    broken[0]["loss_mask"] = broken[0]["loss_mask"][:-1]
    with pytest.raises(ValueError, match="group 0 sample 1: loss_mask has shape"):
        save_rank_file(tmp_path / "f", broken, {})
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = stored(tmp_path)
    before = path.read_bytes()

    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(CheckpointError, match=r"cannot be written.*No space.*make room"):
        save_rank_file(path, [], {})
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_the_file_is_complete_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    path, seen = tmp_path / "f", []
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append(path.exists()))
    save_rank_file(path, samples(), VALUES)
    assert seen == [False, True]  # the content, then the folder with the new name


def test_two_ranks_may_write_the_same_file_at_the_same_time(tmp_path, monkeypatch):
    path, waiting = tmp_path / "f", [samples()]

    def other_rank_writes(descriptor: int) -> None:
        if waiting:
            save_rank_file(path, waiting.pop(), VALUES)

    monkeypatch.setattr(os, "fsync", other_rank_writes)
    save_rank_file(path, samples(), VALUES)
    assert [one.name for one in tmp_path.iterdir()] == ["f"] and waiting == []
    assert load_rank_file(path)[1] == VALUES


def test_other_tools_can_read_the_arrays(tmp_path):
    with safe_open(stored(tmp_path), framework="pt") as file:
        assert file.get_tensor("response_lengths").tolist() == [5, 0, 1]
        assert file.get_tensor("response_ids").tolist() == [3, 2**40, 5, 6, 7, 2]
        assert file.get_tensor("status").tolist() == [int(Status.UNFINISHED)] * 3
