"""What partial rollouts save and cost: `python -m benchmarks.methods`.

The default job on-policy, with naive partial rollout and with RollVerify, for the same number of
trained groups, in turns; read from each run's metrics.jsonl. No evaluation, no checkpoints. Idle
slot-steps are those of slots that the method means to fill: a partial phase refills every slot, so
it has none by construction.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.folders import prepared_base
from benchmarks.isolated import child_environment, report, run_quietly
from rollverify.metrics.recorder import METRICS_FILE

METHODS = ("on_policy", "partial_rollout", "rollverify")


def run_method(method: str, base: Path, seed: int, scratch: Path, words: list[str]) -> Any:
    """Run the launcher.

    Returns:
        The records of the training steps.
    """
    flags = {
        "run.output-dir": scratch,
        "run.seed": seed,
        "method.name": method,
        "model.path": base,
        "data.train": base / "train.jsonl",
        "evaluation.enable": "false",
        "checkpoint.every-steps": 0,
        "checkpoint.export-final": "false",
        "metrics.tensorboard": "false",
        "verification.measure": "false",  # naive partial rollout does not need the scores
    }
    command = [sys.executable, "-m", "rollverify.launch", "--nproc", "1", "--"]
    command += [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    run_quietly([*command, *words], child_environment())
    (file,) = scratch.glob(f"*/{METRICS_FILE}")
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [record for record in records if record["step"] > 0]


def totals(records: list[dict[str, float]], warmup: int) -> dict[str, float]:
    """Sums over the counted steps, and mean shares."""
    counted = records[warmup:]

    def total(key: str) -> float:
        return sum(record[key] for record in counted)

    share = [r.get("verification/step_frac", 0.0) for r in counted]
    return {
        "decode steps": total("rollout/decode_steps"),
        "idle slot-steps": total("rollout/idle_slot_steps"),
        "generated tokens": total("rollout/num_tokens"),
        "trained tokens": total("train/num_tokens"),
        "rollout s": total("time/rollout_s") - total_of(counted, "time/hook/anchor_scoring_s"),
        "train s": total("time/train_s"),
        "verify s": total("time/verify_s") + total_of(counted, "time/hook/anchor_scoring_s"),
        "step s": total("time/step_s"),
        "verify share": statistics.mean(share),
        "acceptance": statistics.mean(r.get("verification/acceptance_rate", 1.0) for r in counted),
        "accuracy": statistics.mean(r["reward/accuracy"] for r in counted),
    }


def total_of(records: list[dict[str, float]], key: str) -> float:
    """Sum of a metric that some methods do not have."""
    return sum(record.get(key, 0.0) for record in records)


def table(sums: dict[str, list[dict[str, float]]]) -> list[list[str]]:
    """Medians over the repeats, and in brackets the ratio to on-policy."""
    names = list(sums[METHODS[0]][0])
    rows = [["per run", *METHODS]]
    for name in names:
        base = statistics.median(one[name] for one in sums[METHODS[0]])
        cells = [name]
        for method in METHODS:
            value = statistics.median(one[name] for one in sums[method])
            ratio = f" ({value / base:.2f})" if base else ""
            cells.append(f"{value:.3g}{ratio}" if value < 10 else f"{value:.0f}{ratio}")
        rows.append(cells)
    return rows


def main() -> None:
    """Measure the methods and print the table."""
    parser = argparse.ArgumentParser(description="Partial rollouts against on-policy.")
    parser.add_argument("--base", type=Path, help="prepared base model; default: make or reuse it")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=4, help="first steps that are not counted")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path, help="JSON file")
    arguments, words = parser.parse_known_args()
    base = prepared_base(arguments.base).resolve()
    words = ["--training.steps", str(arguments.steps), "--switching.enable", "false", *words]
    runs: dict[str, list[Any]] = {method: [] for method in METHODS}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(arguments.repeats):
            for method in METHODS:
                folder = Path(scratch) / f"{method}-{seed}"
                runs[method].append(run_method(method, base, seed, folder, words))
    sums = {name: [totals(run, arguments.warmup) for run in many] for name, many in runs.items()}
    report(table(sums), {"words": words, "totals": sums}, arguments.output)


if __name__ == "__main__":
    main()
