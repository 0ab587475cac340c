"""A whole job on a GPU: it ends, goes on after kill -9, and takes no more memory than planned."""

from pathlib import Path

import pytest
import torch
from integration.jobs import finish, finish_killed, folder_of, records, start

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.slow]

SETTINGS = {
    "training.steps": 3,
    "training.dtype": "bfloat16",
    "engine.dtype": "bfloat16",
    "checkpoint.every_steps": 1,
}


def test_a_bfloat16_job_is_killed_and_goes_on(tmp_path: Path, device: torch.device) -> None:
    finish_killed(start(tmp_path, "job", settings=SETTINGS, kill_at="train:3:0"))
    folder = folder_of(tmp_path, "job")
    finish(start(tmp_path, "job", "--resume", str(folder), settings=SETTINGS))
    rows = records(folder)
    assert sorted(rows) == [0, 1, 2, 3]
    last = rows[3]
    assert last["ledger/trained"] == 4 * 3
    assert last["mismatch/packing_ops_mean"] < 0.01 if "mismatch/packing_ops_mean" in last else True
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory / 2**30
        assert 0 < last["memory/gpu_peak_gib"] <= last["memory/gpu_reserved_peak_gib"] < total
        assert last["memory/gpu_alloc_retries"] == 0
