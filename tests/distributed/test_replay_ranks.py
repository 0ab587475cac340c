"""Replay on two ranks against one: each rank replays its own rows, whatever holds the experts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.replay_scenarios import DENSE_LAYER, LAYOUTS, NUM_LAYERS, replay_scenario
from support.tiny_models import tiny_moe_folder

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run_ranks: Callable[..., None]) -> Path:
    """A model, and the results of all layouts on two ranks from one torchrun."""
    root = tmp_path_factory.mktemp("replay")
    changes = {"num_hidden_layers": NUM_LAYERS, "mlp_only_layers": [DENSE_LAYER]}
    tiny_moe_folder(root / "model", **changes)
    run_ranks("replay_worker.py", str(root), timeout_s=150)
    return root


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> dict[str, Any]:
    return replay_scenario(folder / "model", folder / "one")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_replay_as_one_does(folder: Path, one_rank: dict[str, Any], layout: str) -> None:
    got = torch.load(folder / f"{layout}.pt")
    # Two experts for each of 158 tokens, as 40 - 2 + 24 - 2 + 62 - 2 + 41 - 2 - 1 are fed.
    for total, want in zip(got["stats"], one_rank["stats"], strict=True):
        assert torch.equal(total, want)
    assert torch.equal(got["own"], one_rank["own"])
    assert got["gradients"].keys() == one_rank["gradients"].keys()
    for name, want in one_rank["gradients"].items():
        # Sums of four rows in another order; gradients of size 0.1.
        torch.testing.assert_close(got["gradients"][name], want, atol=1e-6, rtol=1e-4, msg=name)
        assert want.abs().max() > 1e-4, name
    assert got["norm"] == pytest.approx(one_rank["norm"], rel=1e-5)
    for name, want in one_rank["parameters"].items():
        torch.testing.assert_close(got["parameters"][name], want, atol=3e-6, rtol=0.0, msg=name)
    # Log-probs of size 10 under parameters that differ by up to 3e-6.
    torch.testing.assert_close(got["scores"], one_rank["scores"], atol=1e-4, rtol=0.0)
