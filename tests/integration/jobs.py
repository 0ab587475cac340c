"""Starts whole training jobs in a workspace and reads what they left; imported by the job tests."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
START_LIMIT_S = 240
# Clock and memory differ between runs; everything else must repeat exactly.
VARYING = ("time/", "memory/", "sync/push_s", "rollout/tokens_per_s", "train/tokens_per_s")
VARYING += ("verification/scan_s", "verification/scoring_s", "verification/step_frac")

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
    "rollout.oversampling": 2.0,
    "verification.against": "anchor",
}

_LAUNCH = (
    "import sys; from rollverify.launch.launcher import Modules, launch; "
    "sys.exit(launch(sys.argv[2:], int(sys.argv[1]), needs_prepare=True, "
    "modules=Modules(train='support.killed_train')))"
)


def start(
    workspace: Path,
    name: str,
    *flags: str,
    ranks: int = 1,
    settings: dict[str, Any] | None = None,
    kill_at: str = "",
    grace_s: float = 10.0,
) -> subprocess.Popen[str]:
    """Start a job; its folder is the only one below <workspace>/<name>.

    `kill_at` is "<place>:<step>:<rank>", see `killed_train`.
    """
    values = {**SETTINGS, "prepare.cache_dir": workspace / "base", **(settings or {})}
    words = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    output = [] if "--resume" in flags else ["--run.output_dir", str(workspace / name)]
    launcher = ["-m", "rollverify.launch", "--nproc", str(ranks), "--"]
    variables = {"OMP_NUM_THREADS": "1", "ROLLVERIFY_STOP_GRACE_S": str(grace_s)}
    if kill_at:
        launcher = ["-c", _LAUNCH, str(ranks)]
        variables |= {"KILL_AT": kill_at, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    return subprocess.Popen(
        [sys.executable, *launcher, *words, *output, *flags],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(job: subprocess.Popen[str]) -> str:
    """Wait for a job that should succeed; returns its output.

    DH05: with responses still in flight, no process of it is left.
    """
    output, _ = job.communicate(timeout=START_LIMIT_S)
    assert job.returncode == 0, output[-4000:]
    assert not _processes_like(job)
    return output


def _processes_like(job: subprocess.Popen[str]) -> list[list[str]]:
    """Command lines of running processes with the job's flags; every job has folders of its own."""
    flags = [str(word) for word in job.args if "/" in str(word)][-1:]  # type: ignore[union-attr]
    found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [words for words in found if flags and flags[0] in words and "rollverify" in str(words)]


def finish_killed(job: subprocess.Popen[str]) -> None:
    """Wait for a job that is killed on its way."""
    output, _ = job.communicate(timeout=START_LIMIT_S)
    assert job.returncode == 1 and "ended by SIGKILL" in output, output[-4000:]


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


def in_flight(
    folder: Path, rank: int, step: int = STEPS
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Every array of a rank's unfinished trajectories after a step, and its books."""
    from rollverify.checkpoint.rank_file import load_rank_file

    path = folder / "checkpoints" / f"step-{step}" / f"rollout-{rank}.safetensors"
    trajectories, values = load_rank_file(path)
    # torchdata also counts what a process has drawn since its own start.
    values["loader"] = values["loader"]["num_drawn"]
    return [
        {key: repr(one[key].tolist()) for key in sorted(one.keys())} for one in trajectories
    ], values


def assert_same_run(folder: Path, expected: Path, ranks: int = 1, step: int = STEPS) -> None:
    """Metrics, cuts, weights, and every array of what is in flight after the step are equal."""
    assert records(folder) == records(expected)
    for name in ("cuts.jsonl", "slots.jsonl", "model/model.safetensors"):
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name
    for rank in range(ranks):
        assert in_flight(folder, rank, step) == in_flight(expected, rank, step)


def assert_nothing_lost(folder: Path) -> None:
    """Every token of every step has one fate, every prompt one state."""
    for step, row in records(folder).items():
        if step == 0:
            continue
        fates = ("trained", "cut", "discarded", "filtered", "dropped", "held")
        assert row["tokens/generated"] == sum(row[f"tokens/{fate}"] for fate in fates)
        assert row["ledger/trained"] == 4 * step
        waiting = row["ledger/paused"] + row["ledger/pending"]
        assert row["progress/num_prompts"] == row["ledger/trained"] + waiting
