"""Several GPUs: each rank its own device, and the steps of one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from distributed.conftest import run_ranks  # noqa: F401 - the fixture
from integration.jobs import finish, folder_of, records, start
from support.rank_scenarios import SCENARIOS
from support.tiny_models import tiny_folder

pytestmark = [pytest.mark.multi_gpu, pytest.mark.slow]

SHARDED = ("fsdp_tied", "hsdp_tied")


def test_two_gpus_take_the_same_steps_as_one(
    tmp_path: Path,
    run_ranks: Callable[..., None],  # noqa: F811
) -> None:
    """Sums over two ranks in another order; 30 times the bound of CPUs, not measured."""
    tiny_folder(tmp_path / "tied", tie_word_embeddings=True)
    run_ranks("rank_worker.py", str(tmp_path), *SHARDED, timeout_s=300)
    for name in SHARDED:
        run, model, _ = SCENARIOS[name]
        got, want = torch.load(tmp_path / f"{name}.pt"), run(tmp_path / model, tmp_path / "one")
        for key, tensor in want["parameters"].items():
            torch.testing.assert_close(got["parameters"][key], tensor, atol=1e-4, rtol=0.0)


def test_each_rank_has_its_own_engine(tmp_path: Path) -> None:
    finish(start(tmp_path, "two", ranks=2, settings={"training.steps": 2}))
    assert sorted(records(folder_of(tmp_path, "two"))) == [0, 1, 2]
