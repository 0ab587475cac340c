"""The main job as a user starts it: launcher, real engine, real trainer, real checkpoints.

One tiny base model and one uninterrupted run serve all tests of this module.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
START_LIMIT_S = 240
# Clock and memory differ between runs; everything else must repeat exactly.
VARYING = ("time/", "memory/", "sync/push_s", "rollout/tokens_per_s", "train/tokens_per_s")

SETTINGS = {
    "prepare.num_functions": 2,
    "prepare.num_states": 12,
    "prepare.max_steps": 6,
    "prepare.median_steps": 3.0,
    "prepare.num_train_problems": 64,
    "prepare.num_test_problems": 8,
    "prepare.sft_steps": 150,
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 2,
    "rollout.max_response_tokens": 40,
    "engine.max_num_seqs": 16,
    "engine.max_num_batched_tokens": 512,
    "evaluation.num_problems": 4,
    "evaluation.samples_per_problem": 2,
    "training.steps": STEPS,
    "training.lr": 1e-3,
    "checkpoint.every_steps": 2,
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which all runs of this module live; the base model is made by the first."""
    return tmp_path_factory.mktemp("runs")


def start(
    workspace: Path, name: str, *flags: str, ranks: int = 1, settings: dict | None = None
) -> subprocess.Popen[str]:
    """Start a job; its folder is the only one below <workspace>/<name>."""
    values = {**SETTINGS, "prepare.cache_dir": workspace / "base", **(settings or {})}
    words = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    output = [] if "--resume" in flags else ["--run.output_dir", str(workspace / name)]
    launcher = [sys.executable, "-m", "rollverify.launch", "--nproc", str(ranks), "--"]
    return subprocess.Popen(
        [*launcher, *words, *output, *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(job: subprocess.Popen[str]) -> str:
    """Wait for a job that should succeed; returns its output."""
    output, _ = job.communicate(timeout=START_LIMIT_S)
    assert job.returncode == 0, output[-4000:]
    return output


def folder_of(workspace: Path, name: str) -> Path:
    (folder,) = (workspace / name).iterdir()
    return folder


def wait_for_step(workspace: Path, name: str, step: int) -> Path:
    """Wait until a step is logged; returns the run folder."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        for file in (workspace / name).glob("*/metrics.jsonl"):
            if max(records(file.parent), default=0) >= step:
                return file.parent
        time.sleep(0.02)
    raise AssertionError(f"run {name} did not reach step {step}")


def records(folder: Path) -> dict[int, dict[str, float]]:
    """Metrics by step that must repeat exactly."""
    rows = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows[row["step"]] = {k: v for k, v in row.items() if not k.startswith(VARYING)}
    return rows


@pytest.fixture(scope="module")
def whole_run(workspace: Path) -> tuple[Path, str]:
    """(folder, output) of a run that nothing interrupts."""
    output = finish(start(workspace, "whole"))
    return folder_of(workspace, "whole"), output


def test_main_job_leaves_config_metrics_report_and_model(whole_run: tuple[Path, str]) -> None:
    folder, output = whole_run
    assert json.loads((folder / "config.json").read_text())["training"]["steps"] == STEPS
    assert sorted(records(folder)) == list(range(STEPS + 1))
    assert "mean@2" in output and "greedy accuracy" in output
    assert (folder / "report.txt").read_text().strip() in output
    assert list((folder / "tb").glob("events.*"))


def test_engine_and_trainer_agree_at_every_step(whole_run: tuple[Path, str]) -> None:
    rows = [row for step, row in records(whole_run[0]).items() if step > 0]
    # Float32 on both sides: DESIGN's bound for the parity of sampled tokens.
    assert all(row["mismatch/logprob_abs_max"] <= 1e-5 for row in rows)
    assert all(row["sync/parity_abs_max"] <= 1e-5 for row in rows)


def test_exported_model_loads_in_transformers_and_differs_from_the_base(
    whole_run: tuple[Path, str], workspace: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(whole_run[0] / "model")
    (base_folder,) = (workspace / "base").iterdir()
    base = AutoModelForCausalLM.from_pretrained(base_folder)
    trained, before = model.state_dict(), base.state_dict()
    assert trained.keys() == before.keys()
    assert any(not trained[name].equal(before[name]) for name in trained)
    assert AutoTokenizer.from_pretrained(whole_run[0] / "model").vocab_size == 80


def test_run_stopped_then_killed_equals_the_uninterrupted_run(
    whole_run: tuple[Path, str], workspace: Path
) -> None:
    """SIGTERM, resume, kill -9, resume: rewards, lengths and final weights show every token."""
    job = start(workspace, "broken")
    folder = wait_for_step(workspace, "broken", 1)
    job.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 143, output[-2000:]
    assert time.monotonic() - begin < 10
    last = max(records(folder))
    assert (folder / "checkpoints" / f"step-{last}" / ".metadata").is_file()

    job = start(workspace, "broken", "--resume", str(folder))
    wait_for_step(workspace, "broken", max(3, last + 1))
    job.kill()
    job.communicate()

    finish(start(workspace, "broken", "--resume", str(folder)))
    assert records(folder) == records(whole_run[0])
    weights = Path("model/model.safetensors")
    assert (folder / weights).read_bytes() == (whole_run[0] / weights).read_bytes()


@pytest.mark.distributed
def test_two_ranks_train_and_resume(workspace: Path, whole_run: tuple[Path, str]) -> None:
    finish(start(workspace, "two", ranks=2))
    folder = folder_of(workspace, "two")
    two, one = records(folder), records(whole_run[0])
    # The same prompts and seeds on the same weights; sums over ranks round differently.
    assert two[1]["reward/mean"] == one[1]["reward/mean"]
    assert two[1]["rollout/num_tokens"] == one[1]["rollout/num_tokens"]
    assert two[1]["train/grad_norm"] == pytest.approx(one[1]["train/grad_norm"], rel=1e-4)
    assert all(row["sync/parity_abs_max"] <= 1e-5 for step, row in two.items() if step)
    shutil.rmtree(folder / "checkpoints" / f"step-{STEPS}")
    finish(start(workspace, "two", "--resume", str(folder), ranks=2))
    assert records(folder) == two


def test_refused_resume_leaves_the_run_as_it_was(
    whole_run: tuple[Path, str], workspace: Path
) -> None:
    folder, _ = whole_run
    before = {name: (folder / name).read_bytes() for name in ("config.toml", "metrics.jsonl")}
    other = {"prepare.hidden_size": 32, "prepare.sft_steps": 2, "training.steps": STEPS + 1}
    other |= {"prepare.cache_dir": workspace / "other-base"}
    job = start(workspace, "whole", "--resume", str(folder), settings=other)
    output, _ = job.communicate(timeout=START_LIMIT_S)
    assert job.returncode == 2, output[-2000:]
    assert "belongs to another model" in output.splitlines()[-1]
    assert {name: (folder / name).read_bytes() for name in before} == before
