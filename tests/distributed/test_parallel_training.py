"""Two ranks against one on the same global batch: FSDP2, HSDP, tensor parallel, uneven rows.

Rows are split over ranks and sums are taken in another order; nothing else may differ.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_scenarios import SCENARIOS
from support.tiny_models import Reference, tiny_folder, tiny_llama_folder

pytestmark = pytest.mark.distributed

# Gradients of size 0.1 summed in another order differ by 1e-8 to 1e-7; Adam divides by |g| + 1e-3
# and the learning rate is 1e-2, so each of three steps may add 1e-6 at most.
PARAMETER_TOLERANCE = {"atol": 3e-6, "rtol": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run_ranks: Callable[..., None]) -> Path:
    """Models, and the results of all scenarios on two ranks from one torchrun."""
    root = tmp_path_factory.mktemp("ranks")
    for name in ("tied", "untied"):
        tiny_folder(root / name, tie_word_embeddings=name == "tied")
    tiny_llama_folder(root / "llama")
    run_ranks("rank_worker.py", str(root), *SCENARIOS, timeout_s=150)
    return root


def two_ranks(folder: Path, name: str) -> dict[str, Any]:
    return torch.load(folder / f"{name}.pt")


def one_rank(folder: Path, name: str) -> dict[str, Any]:
    run, model, _ = SCENARIOS[name]
    return run(folder / model, folder / f"one_{name}")


def assert_same_parameters(got: dict[str, Any], want: dict[str, Any], model: Path) -> None:
    start = Reference(model).model.state_dict()
    assert list(got) == list(want)
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, **PARAMETER_TOLERANCE, msg=name)
        # Far above the tolerance: weights that were never trained could not pass.
        assert (tensor - start[name]).abs().max() > 1e-3, name


STEPS = [name for name, (run, _, _) in SCENARIOS.items() if run.__name__ == "steps_scenario"]


@pytest.mark.parametrize("name", STEPS)
def test_two_ranks_take_the_same_steps_as_one(folder: Path, name: str) -> None:
    """AG05: global counts, summed gradients, and no average on top."""
    got, want = two_ranks(folder, name), one_rank(folder, name)
    assert got["data_world_size"] == (1 if name.startswith("tensor") else 2)
    assert_same_parameters(got["parameters"], want["parameters"], folder / SCENARIOS[name][1])
    # Norms before clipping: one rounding of a sum over 70,000 squares.
    assert got["norms"] == pytest.approx(want["norms"], rel=1e-5)
    # Scores of size 10 under parameters that differ by up to 3e-6 over two layers.
    torch.testing.assert_close(got["score"], want["score"], atol=1e-4, rtol=0.0)


def test_uneven_rows_are_filled_up_and_do_not_change_the_step(folder: Path) -> None:
    """DH01: 3 rows of 8 tokens against 1 row of 4 + 4; both ranks run 3."""
    got, want = two_ranks(folder, "uneven_tied"), one_rank(folder, "uneven_tied")
    assert got["metrics"]["train/num_micro_batches"] == 3
    assert want["metrics"]["train/num_micro_batches"] == 4
    # 3 responses of 7 tokens and 2 of 3: fillers are not counted.
    assert got["metrics"]["train/num_tokens"] == want["metrics"]["train/num_tokens"] == 27
    assert_same_parameters(got["parameters"], want["parameters"], folder / "tied")
    for key in want["metrics"].keys() - {"train/num_micro_batches"}:
        # Sums of 27 float32 values of size up to 10.
        assert got["metrics"][key] == pytest.approx(want["metrics"][key], rel=1e-5, abs=1e-6), key


@pytest.mark.parametrize("name", ["reference_tied", "reference_untied"])
def test_a_sharded_reference_scores_as_one_rank_does(folder: Path, name: str) -> None:
    """The start weights' scores, whatever the policy has become; each rank its own rows."""
    got, want = two_ranks(folder, name), one_rank(folder, name)
    assert torch.equal(got["reference"], got["start"])
    assert (got["own"][0] - got["start"]).abs().max() > 1e-3
    torch.testing.assert_close(got["reference"], want["reference"], atol=1e-5, rtol=0.0)
    rank, scores = got["rows"]
    expected = want["rows"][1][rank::2]
    assert len(scores) == len(expected) == 2
    for mine, alone in zip(scores, expected, strict=True):
        # Start weights are equal bit by bit; sums of two layers are taken in another order.
        torch.testing.assert_close(mine, alone, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("name", ["reference_tied", "reference_untied"])
def test_a_sharded_reference_leaves_the_policy_bit_for_bit(folder: Path, name: str) -> None:
    """Also where a scoring pass has just left parameters gathered."""
    got, model = two_ranks(folder, name), name.removeprefix("reference_")
    before, after = got["parameters"]
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert torch.equal(*got["own"])
    # Three steps with scoring passes in between are three steps.
    untouched = two_ranks(folder, f"fsdp_{model}")["parameters"]
    assert all(torch.equal(got["next"][key], untouched[key]) for key in untouched)


def test_copies_of_the_shards_add_their_gradients_once_a_step(folder: Path) -> None:
    """As many all-reduces for two rows as for one; without it there were twice as many."""
    result = two_ranks(folder, "communication_hsdp")
    name = "c10d.allreduce_.default"
    assert result["two_rows"][name] == result["one_row"][name] == 3  # two layers, and the rest


def test_shards_are_cast_before_they_are_gathered(folder: Path) -> None:
    """The same bits as cast afterwards, and half the bytes between the ranks."""
    result = two_ranks(folder, "communication_fsdp")
    assert result["cast"].keys() == result["plain"].keys()
    for name, tensor in result["plain"].items():
        assert torch.equal(result["cast"][name], tensor), name
    size = sum(2 * tensor.numel() for tensor in result["plain"].values())
    assert size <= result["gathered"] < 1.1 * size  # Uneven shards are padded.


def test_sharded_checkpoint_resumes_bit_for_bit(folder: Path) -> None:
    result = two_ranks(folder, "checkpoint_untied")
    assert result["straight"].keys() == result["resumed"].keys()
    for name, tensor in result["straight"].items():
        assert torch.equal(result["resumed"][name], tensor), name
