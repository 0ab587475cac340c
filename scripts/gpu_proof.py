"""The checks of `scripts/gpu_proof.sh`, each in a process of its own, and their table."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
ON_GPU = torch.cuda.is_available() and os.environ.get("ROLLVERIFY_DEVICE") != "cpu"
STEPS = 5
BFLOAT16 = ["--training.dtype", "bfloat16", "--engine.dtype", "bfloat16"]
JOB = ["--evaluation.no-enable", "--checkpoint.no-export-final", "--metrics.no-tensorboard"]
SMALL = ["--rollout.prompts-per-step", "8", "--engine.max-num-seqs", "128"]
"""On CPUs, where nothing but the script is tried."""

BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12, "A100": 2.0e12, "B200": 8.0e12}
"""Bytes per second of a GPU's memory by what its name holds; others are measured by a copy."""

Result = dict[str, Any]


class CheckError(Exception):
    """A check did not come out as it must."""


def run(command: list[str], timeout_s: float, **variables: str) -> str:
    """Output of a command that must succeed."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise CheckError(f"ended with {done.returncode}: {lines[-1] if lines else 'no output'}")
    return done.stdout + done.stderr


def machine() -> Result:
    """Versions, driver and GPU."""
    import torchtitan
    import vllm

    found: Result = {"torch": torch.__version__, "vllm": vllm.__version__}
    found |= {"cuda": torch.version.cuda, "torchtitan": getattr(torchtitan, "__version__", "?")}
    if ON_GPU:
        found["gpu"] = torch.cuda.get_device_name()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = run(query, 30).split()[0]
    return found


def tests() -> Result:
    """tests/gpu: trainer, head, experts, engine, transfers, pauses, sleep, verification, kill."""
    command = [sys.executable, "-m", "pytest", "-m", "", "-q", "tests/gpu"]
    output = run(command, 600, **({} if ON_GPU else {"ROLLVERIFY_GPU_TESTS": "cpu"}))
    counts = re.findall(r"(\d+) (passed|skipped)", output)
    return {what: int(number) for number, what in counts}


def job(folder: Path, name: str, *flags: str, kill_after: int | None = None) -> Path:
    """Folder of a run of the default job in bfloat16; killed -9 once that step is saved."""
    command = [sys.executable, "-m", "rollverify.launch", "--nproc", "1", "--", *BFLOAT16, *JOB]
    command += [] if ON_GPU else SMALL
    command += ["--training.steps", str(STEPS), "--run.output-dir", str(folder / name), *flags]
    if kill_after is None:
        run(command, 300)
    else:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        saved, limit = f"*/checkpoints/step-{kill_after}/.metadata", time.monotonic() + 300
        while not list((folder / name).glob(saved)):
            if time.monotonic() > limit or process.poll() is not None:
                raise CheckError(f"the job did not reach step {kill_after}")
            time.sleep(0.2)
        process.kill()
        process.wait()
    return next(iter((folder / name).glob("*/config.toml"))).parent


def rows_of(run_folder: Path) -> list[dict[str, float]]:
    """Metrics of the steps."""
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["step"] > 0]


def stays_put(folder: Path) -> Result:
    """At learning rate 0 verification must cut nothing: the policy has not moved."""
    found = job(folder, "still", "--training.lr", "0", "--checkpoint.every-steps", "0")
    rows, cuts = rows_of(found), (found / "cuts.jsonl").read_text().splitlines()
    noise = {
        "engine_ops_mean": max(row["mismatch/ops_mean"] for row in rows),
        "packing_ops_mean": rows[0]["mismatch/packing_ops_mean"],
        "unfinished_ops_max": max(row.get("ops/unfinished_segment_max", 0.0) for row in rows),
        "parity_abs_max": max(row["sync/parity_abs_max"] for row in rows),
        "cuts": len(cuts),
    }
    if cuts:
        raise CheckError(f"{len(cuts)} responses were cut of a policy that did not move: {noise}")
    return noise


def goes_on(folder: Path) -> Result:
    """A run that is killed and resumed takes the steps that are left, as many tokens trained."""
    every = ["--checkpoint.every-steps", "1"]
    whole = rows_of(job(folder, "whole", *every))
    killed = job(folder, "killed", *every, kill_after=2)
    run(
        [sys.executable, "-m", "rollverify.launch", "--nproc", "1", "--", *BFLOAT16, *JOB]
        + ([] if ON_GPU else SMALL)
        + ["--training.steps", str(STEPS), *every, "--resume", str(killed)],
        300,
    )
    rows = rows_of(killed)
    if [row["step"] for row in rows] != list(range(1, STEPS + 1)):
        raise CheckError(f"steps after the resume: {[row['step'] for row in rows]}")
    same = all(a["train/loss"] == b["train/loss"] for a, b in zip(whole, rows, strict=True))
    return {"same_losses_as_uninterrupted": same}


def speed(folder: Path) -> Result:
    """Tokens per second of decoding, scoring and training, and memory against the plan."""
    found = job(folder, "speed", "--checkpoint.every-steps", "0")
    last = rows_of(found)[-1]
    result: Result = {
        "decoding_tokens_per_s": last["rollout/tokens_per_s"],
        "training_tokens_per_s": last["train/tokens_per_s"],
    }
    if last.get("verification/scoring_s"):
        checked = last["verification/tokens_checked"]
        result["scoring_tokens_per_s"] = 2 * checked / last["verification/scoring_s"]
    if not ON_GPU:
        return result
    name, total = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    bandwidth = next((b for part, b in BANDWIDTH.items() if part in name), None) or measured_copy()
    weights = sum(f.stat().st_size for f in (ROOT / "outputs/base").rglob("*.safetensors")) / 2
    steps_per_s = last["rollout/decode_steps"] / last["time/rollout_s"]
    result |= {
        "decoding_weights_bandwidth_frac": steps_per_s * weights / bandwidth,
        "training_mfu": last["train/mfu"],
        "peak_gib": last["memory/gpu_peak_gib"],
        "reserved_peak_gib": last["memory/gpu_reserved_peak_gib"],
    }
    plan = run(
        [sys.executable, "-m", "rollverify.dry_run", *BFLOAT16, "--gpu-gib", str(total / 2**30)],
        120,
    )
    totals = next(line for line in plan.splitlines() if line.strip().startswith("in all"))
    result["planned_gib_by_phase"] = [float(word) for word in totals.split()[2:]]
    if result["reserved_peak_gib"] > max(result["planned_gib_by_phase"]):
        raise CheckError(f"more memory than planned: {result}")
    return result


def measured_copy() -> float:
    """Bytes per second of reading and writing the GPU's memory."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        target.copy_(source)
    torch.cuda.synchronize()
    return 2 * 10 * 2**30 / (time.perf_counter() - start)


def checks(folder: Path) -> Iterator[tuple[str, Callable[[], Result]]]:
    """Name and check, in order."""
    yield "machine", machine
    yield "tests", tests
    yield "learning rate 0", lambda: stays_put(folder)
    yield "kill and resume", lambda: goes_on(folder)
    yield "speed and memory", lambda: speed(folder)


def prove(output: Path, named: Iterator[tuple[str, Callable[[], Result]]]) -> int:
    """Run the checks, write what each gave as it comes, print a table; 1 if one failed."""
    results: dict[str, Result] = {}
    failed = []
    for name, check in named:
        start = time.monotonic()
        try:
            results[name] = {"ok": True, **check()}
        except (CheckError, subprocess.TimeoutExpired, OSError, KeyError, StopIteration) as error:
            results[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
            failed.append(name)
        results[name]["seconds"] = round(time.monotonic() - start, 1)
        output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        for key, value in results[name].items():
            shown = f"{value:.4g}" if isinstance(value, float) else value
            print(f"{name:<18} {key:<32} {shown}", flush=True)
    print(f"{output}: {', '.join(failed) + ' failed' if failed else 'every check passed'}")
    return 1 if failed else 0


def main(argv: list[str]) -> int:
    """Prove this machine; the jobs run in a folder that is deleted afterwards."""
    output = Path(argv[0] if argv else "gpu_proof.json")
    folder = Path(tempfile.mkdtemp(prefix="gpu_proof_"))
    try:
        run([sys.executable, "-m", "rollverify.toy.base_model"], 600)
        return prove(output, checks(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
