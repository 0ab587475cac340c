"""A model with experts on two ranks against one on the same global batch: FSDP2, EP, TP.

Rows, and with EP or TP the experts too, are split over ranks, and sums are taken in another
order; nothing else may differ.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.rank_scenarios import MOE_SCENARIOS
from support.tiny_models import tiny_moe_folder

pytestmark = pytest.mark.distributed

# As in test_parallel_training: three steps of at most 1e-6 each.
PARAMETER_TOLERANCE = {"atol": 3e-6, "rtol": 0.0}
# Sums over 154 tokens of float32 gradients of size 1 in another order.
GRADIENT_TOLERANCE = {"atol": 2e-6, "rtol": 1e-4}
LAYOUTS = ["fsdp", "expert_parallel", "tensor_parallel"]
GRADIENT_LAYOUTS = [*LAYOUTS, "hsdp"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run_ranks: Callable[..., None]) -> Path:
    """The model, a dense layer below two with experts, and the results of one torchrun."""
    root = tmp_path_factory.mktemp("moe_ranks")
    tiny_moe_folder(root / "experts", num_hidden_layers=3, mlp_only_layers=[0])
    run_ranks("rank_worker.py", str(root), *MOE_SCENARIOS, timeout_s=240)
    return root


def two_ranks(folder: Path, name: str) -> dict[str, Any]:
    return torch.load(folder / f"{name}.pt")


def one_rank(folder: Path, name: str) -> dict[str, Any]:
    run, model, _ = MOE_SCENARIOS[name]
    return run(folder / model, folder / f"one_{name}")


@pytest.mark.parametrize("layout", GRADIENT_LAYOUTS)
def test_every_rank_reads_and_hands_out_every_expert(folder: Path, layout: str) -> None:
    """Folder to sharded trainer to full tensors, bit for bit."""
    got = two_ranks(folder, f"moe_gradients_{layout}")["loaded"]
    want = load_file(folder / "experts" / "model.safetensors")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


@pytest.mark.parametrize("layout", GRADIENT_LAYOUTS)
def test_gradients_equal_those_of_one_rank(folder: Path, layout: str) -> None:
    name = f"moe_gradients_{layout}"
    got, want = two_ranks(folder, name)["gradients"], one_rank(folder, name)["gradients"]
    assert got.keys() == want.keys()
    for parameter, gradient in want.items():
        assert gradient.abs().max() > 1e-3, parameter
        torch.testing.assert_close(got[parameter], gradient, **GRADIENT_TOLERANCE, msg=parameter)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_take_the_same_steps_as_one(folder: Path, layout: str) -> None:
    """AG05: global counts, summed gradients, one norm over dense and expert parameters."""
    name = f"moe_steps_{layout}"
    got, want = two_ranks(folder, name), one_rank(folder, name)
    assert got["data_world_size"] == (1 if layout == "tensor_parallel" else 2)
    for parameter, tensor in want["parameters"].items():
        torch.testing.assert_close(
            got["parameters"][parameter], tensor, **PARAMETER_TOLERANCE, msg=parameter
        )
    # Norms before clipping: one rounding of a sum over 150,000 squares.
    assert got["norms"] == pytest.approx(want["norms"], rel=1e-5)
    torch.testing.assert_close(got["score"], want["score"], atol=1e-4, rtol=0.0)


def test_uneven_rows_keep_expert_parallel_ranks_in_step(folder: Path) -> None:
    """DH01: 3 rows against 1; a filler row takes part in every exchange of tokens."""
    name = "moe_uneven_expert_parallel"
    got, want = two_ranks(folder, name), one_rank(folder, name)
    assert got["metrics"]["train/num_micro_batches"] == 3
    for parameter, tensor in want["parameters"].items():
        torch.testing.assert_close(
            got["parameters"][parameter], tensor, **PARAMETER_TOLERANCE, msg=parameter
        )


@pytest.mark.parametrize("layout", ["fsdp", "expert_parallel"])
def test_sharded_checkpoint_resumes_bit_for_bit(folder: Path, layout: str) -> None:
    result = two_ranks(folder, f"moe_checkpoint_{layout}")
    assert result["straight"].keys() == result["resumed"].keys()
    for name, tensor in result["straight"].items():
        assert torch.equal(result["resumed"][name], tensor), name
