"""Trained tokens per second against TRL: `python -m benchmarks.trl_end_to_end`.

Rollout and training together, on the same model, prompts, lengths, optimizer settings and number of
threads, which the ranks of a side share. The sides take turns, each in fresh processes of its own:
RollVerify as its launcher starts it, read from the run's metrics.jsonl; TRL's GRPOTrainer with its
built-in transformers generation.
Neither evaluates or saves; the first steps are not counted. Flags that are not its own go to
RollVerify's command line. Needs the extra `bench`.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.folders import num_parameters, prepared_base, write_endless_folder
from benchmarks.isolated import child_environment, measure, report, run_quietly
from rollverify.metrics.recorder import METRICS_FILE


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What both sides do."""

    folder: str
    """Hugging Face model folder."""

    train_file: str
    """Prompts, taken in file order."""

    groups: int
    """Prompts per step."""

    group_size: int
    """Responses per prompt."""

    max_response_tokens: int
    """Limit of one response."""

    target: float
    """Least ratio of trained tokens per second, RollVerify / TRL."""

    steps: int
    """Optimizer steps, warm-up included."""

    warmup: int
    """First steps that are not counted."""

    lr: float = 4.5e-4
    """Constant learning rate of AdamW."""


def make_cases(scratch: Path, base: Path, steps: int, warmup: int) -> dict[str, Case]:
    """Equal lengths on a random 0.8M model that never stops; long-tailed ones on the base model."""
    endless = write_endless_folder(scratch / "endless", 1024)
    return {
        "equal": Case(
            folder=str(endless),
            train_file=str(endless / "train.jsonl"),
            groups=8,
            group_size=8,
            max_response_tokens=256,
            target=1.0,
            steps=steps,
            warmup=warmup,
        ),
        "long-tailed": Case(
            folder=str(base.resolve()),
            train_file=str(base.resolve() / "train.jsonl"),
            groups=32,
            group_size=8,
            max_response_tokens=352,
            target=2.0,
            steps=steps,
            warmup=warmup,
        ),
    }


def run_rollverify(
    case: Case, seed: int, scratch: Path, threads: int, ranks: int, words: list[str]
) -> dict[str, Any]:
    """Run the launcher and read what the run recorded.

    Returns:
        Per step: "tokens" in the loss, "seconds", "longest" response, "rollout_s", "train_s".
    """
    flags = {
        "run.output-dir": scratch,
        "method.name": "on_policy",
        "run.seed": seed,
        "model.path": case.folder,
        "data.train": case.train_file,
        "data.shuffle": "false",
        "rollout.prompts-per-step": case.groups,
        "rollout.group-size": case.group_size,
        "rollout.max-response-tokens": case.max_response_tokens,
        "engine.max-num-seqs": case.groups * case.group_size // ranks,
        "training.steps": case.steps,
        "training.lr": case.lr,
        "evaluation.enable": "false",
        "checkpoint.every-steps": 0,
        "checkpoint.export-final": "false",
    }
    command = [sys.executable, "-m", "rollverify.launch", "--nproc", str(ranks), "--"]
    command += [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    run_quietly([*command, *words], child_environment(OMP_NUM_THREADS=str(threads)))
    (file,) = scratch.glob(f"*/{METRICS_FILE}")
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    records = [record for record in lines if record["step"] > 0]
    keys = {
        "tokens": "train/num_tokens",
        "seconds": "time/step_s",
        "longest": "rollout/response_tokens_max",
        "rollout_s": "time/rollout_s",
        "train_s": "time/train_s",
    }
    return {name: [record[key] for record in records] for name, key in keys.items()}


def run_trl(
    case: Case,
    seed: int,
    scratch: Path,
    threads: int,
    ranks: int,
    micro_batch: int,
    wait_policy: str,
) -> dict[str, Any]:
    """Run TRL in its own processes.

    Returns:
        See `trl_side.run`.
    """
    task = asdict(case) | {
        "seed": seed,
        "ranks": ranks,
        "scratch": str(scratch),
        "trl_micro_batch": micro_batch,
    }
    variables = {"OMP_NUM_THREADS": str(threads)}
    if wait_policy != "default":
        variables["OMP_WAIT_POLICY"] = wait_policy
    return measure("benchmarks.trl_side", task, ranks, **variables)


def tokens_per_s(result: dict[str, Any], warmup: int) -> float:
    """Trained tokens per second of the counted steps."""
    return sum(result["tokens"][warmup:]) / sum(result["seconds"][warmup:])


def row(name: str, case: Case, sides: dict[str, list[dict[str, Any]]]) -> list[str]:
    """One line of the table: medians over the repeats, and the ratio's range."""
    speeds = {
        side: [tokens_per_s(result, case.warmup) for result in results]
        for side, results in sides.items()
    }
    pairs = list(zip(speeds["rollverify"], speeds["trl"], strict=True))
    ratios = [ours / theirs for ours, theirs in pairs]
    lengths = [
        statistics.mean(
            sum(result["tokens"][case.warmup :])
            / (case.groups * case.group_size * (case.steps - case.warmup))
            for result in results
        )
        for results in sides.values()
    ]
    return [
        name,
        f"{case.groups * case.group_size}",
        " / ".join(f"{length:.0f}" for length in lengths),
        f"{statistics.median(speeds['rollverify']):.0f}",
        f"{statistics.median(speeds['trl']):.0f}",
        f"{statistics.median(ratios):.2f}",
        f"{min(ratios):.2f}-{max(ratios):.2f}",
        f"{case.target:.0f}",
    ]


def main() -> None:
    """Measure the cases and print the table."""
    parser = argparse.ArgumentParser(description="Trained tokens per second against TRL.")
    parser.add_argument("--base", type=Path, help="prepared base model; default: make or reuse it")
    parser.add_argument("--cases", nargs="+", default=["equal", "long-tailed"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of RollVerify")
    parser.add_argument("--trl-ranks", type=int, default=1, help="ranks of TRL")
    parser.add_argument("--trl-micro-batch", type=int, default=64, help="sequences")
    parser.add_argument(
        "--trl-wait-policy",
        choices=["default", "passive"],
        default="default",
        help="OMP_WAIT_POLICY of TRL's process",
    )
    parser.add_argument("--output", type=Path, help="JSON file")
    arguments, words = parser.parse_known_args()
    try:
        version = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        sys.exit("error: TRL is not installed; pip install -e '.[bench]'")
    threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
    rows = [["lengths", "sequences", "mean tokens", "RollVerify tok/s", "TRL tok/s", "ratio"]]
    rows[0] += ["range", "target"]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        base = prepared_base(arguments.base)
        cases = make_cases(scratch, base, arguments.steps, arguments.warmup)
        for name in arguments.cases:
            case = cases[name]
            sides: dict[str, list[dict[str, Any]]] = {"rollverify": [], "trl": []}
            for seed in range(arguments.repeats):
                ours, theirs = scratch / f"{name}-{seed}-ours", scratch / f"{name}-{seed}-trl"
                sides["rollverify"].append(
                    run_rollverify(
                        case, seed, ours, threads // arguments.ranks, arguments.ranks, words
                    )
                )
                sides["trl"].append(
                    run_trl(
                        case,
                        seed,
                        theirs,
                        threads // arguments.trl_ranks,
                        arguments.trl_ranks,
                        arguments.trl_micro_batch,
                        arguments.trl_wait_policy,
                    )
                )
            label = f"{name} ({num_parameters(Path(case.folder)) / 1e6:.2f}M)"
            rows.append(row(label, case, sides))
            results[name] = {"case": asdict(case), **sides}
    print(
        f"trained tokens per second, {threads} threads a side, RollVerify on {arguments.ranks} "
        f"rank(s) {' '.join(words)}, TRL {version} on {arguments.trl_ranks}"
    )
    values = {"threads": threads, "trl": version, "arguments": sys.argv[1:], "results": results}
    report(rows, values, arguments.output)


if __name__ == "__main__":
    main()
