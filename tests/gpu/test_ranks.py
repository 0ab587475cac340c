"""Several GPUs: each rank its own device, the same weights in each engine, and the steps of one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from distributed.conftest import run_ranks  # noqa: F401 - the fixture
from integration.jobs import finish, folder_of, records, start
from support.bfloat16_pair import NOISE
from support.rank_scenarios import SCENARIOS
from support.tiny_models import tiny_folder

pytestmark = [pytest.mark.multi_gpu, pytest.mark.slow]

SHARDED = ("fsdp_tied", "hsdp_tied")
STEPS_APART = 1e-4
"""Largest difference of a weight after three float32 steps: sums over two ranks in another order.
30 times the bound of CPUs, not measured."""


def test_two_gpus_take_the_same_steps_as_one(
    tmp_path: Path,
    run_ranks: Callable[..., None],  # noqa: F811
) -> None:
    tiny_folder(tmp_path / "tied", tie_word_embeddings=True)
    run_ranks("rank_worker.py", str(tmp_path), *SHARDED, timeout_s=300)
    for name in SHARDED:
        run, model, _ = SCENARIOS[name]
        got, want = torch.load(tmp_path / f"{name}.pt"), run(tmp_path / model, tmp_path / name)
        assert got["data_world_size"] == 2
        for key, tensor in want["parameters"].items():
            ours = got["parameters"][key].to(tensor.device)
            torch.testing.assert_close(ours, tensor, atol=STEPS_APART, rtol=0.0)


def test_each_rank_has_an_engine_on_its_own_gpu_with_the_trainers_weights(
    tmp_path: Path,
    device: torch.device,
    run_ranks: Callable[..., None],  # noqa: F811
) -> None:
    tiny_folder(tmp_path / "model", max_position_embeddings=512)
    worker = Path(__file__).with_name("pair_worker.py")
    run_ranks(str(worker), str(tmp_path), timeout_s=300)
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    for rank, found in enumerate(ranks):
        place = f"cuda:{rank}" if device.type == "cuda" else "cpu"
        assert (found["trainer"], found["engine"]) == (device.type, [place])
        assert found["current"] == (rank if device.type == "cuda" else None)
        assert found["data_ranks"] == 2
        gaps = [abs(a - b) for a, b in zip(found["after"], found["of_trainer"], strict=True)]
        assert max(gaps) <= NOISE
        assert max(abs(a - b) for a, b in zip(found["before"], found["after"], strict=True)) > NOISE
    both = zip(ranks[0]["after"], ranks[1]["after"], strict=True)
    assert max(abs(a - b) for a, b in both) <= NOISE


def test_a_job_on_two_gpus_ends(tmp_path: Path) -> None:
    finish(start(tmp_path, "two", ranks=2, settings={"training.steps": 2}))
    assert sorted(records(folder_of(tmp_path, "two"))) == [0, 1, 2]
