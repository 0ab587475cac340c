"""A whole job on a GPU: it ends, goes on after kill -9, and takes no more memory than planned."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.jobs import ROOT, finish, finish_killed, folder_of, start
from support.bfloat16_pair import NOISE

from rollverify.config.tables import Config

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.slow]

GIB = 2**30
STEPS = 3
SETTINGS: dict[str, Any] = {
    "training.steps": STEPS,
    "training.dtype": "bfloat16",
    "engine.dtype": "bfloat16",
    "checkpoint.every_steps": 1,
}
DEFAULT_SIZED: dict[str, Any] = {
    f"{table}.{name}": getattr(getattr(Config(), table), name)
    for table, names in {
        "rollout": ("prompts_per_step", "group_size", "max_response_tokens"),
        "engine": ("max_num_seqs", "max_num_batched_tokens"),
        "prepare": ("num_functions", "num_states", "max_steps", "median_steps", "sft_steps"),
    }.items()
    for name in names
}
"""For GPUs; on a CPU the job keeps the size of the other job tests."""


def planned_gib(run_folder: Path, gpu_gib: float) -> float:
    """Most of all phases by `--dry-run` with the settings of a run."""
    command = [sys.executable, "-m", "rollverify.dry_run", "--gpu-gib", str(gpu_gib)]
    command += ["--config", str(run_folder / "config.toml")]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (row,) = (line for line in done.stdout.splitlines() if line.strip().startswith("in all"))
    return max(map(float, row.split()[2:]))


def all_metrics(run_folder: Path) -> list[dict[str, float]]:
    """Those of every step, with those that vary."""
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["step"] > 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Path:
    """A run that was killed in its last step and went on."""
    workspace = tmp_path_factory.mktemp("job")
    settings = SETTINGS | (DEFAULT_SIZED if device.type == "cuda" else {})
    finish_killed(start(workspace, "job", settings=settings, kill_at=f"train:{STEPS}:0"))
    found = folder_of(workspace, "job")
    finish(start(workspace, "job", "--resume", str(found), settings=settings))
    return found


def test_a_killed_job_goes_on_and_accounts_for_every_token(folder: Path) -> None:
    rows = all_metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    fates = ("trained", "cut", "discarded", "filtered", "dropped", "held")
    for row in rows:
        assert row["tokens/generated"] == sum(row[f"tokens/{fate}"] for fate in fates)
        assert row["ledger/trained"] == row["step"] * rows[0]["ledger/trained"] > 0


def test_a_job_says_how_much_of_ops_is_noise(folder: Path) -> None:
    first, *rest = all_metrics(folder)
    assert first["mismatch/packing_ops_mean"] < Config().verification.segment_threshold
    assert all(0.0 < row["mismatch/ops_mean"] < NOISE for row in [first, *rest])


def test_a_job_takes_no_more_memory_than_planned(folder: Path, device: torch.device) -> None:
    assert 0.0 < planned_gib(folder, 80.0) < 80.0
    if device.type == "cpu":
        pytest.skip("the peak is that of a GPU")
    total = torch.cuda.get_device_properties(0).total_memory / GIB
    peaks = [row["memory/gpu_reserved_peak_gib"] for row in all_metrics(folder)]
    assert 0.0 < max(peaks) <= planned_gib(folder, total)
    assert all(row["memory/gpu_alloc_retries"] == 0 for row in all_metrics(folder))
