"""Runs three short jobs here and at another commit, and says whether all their numbers are equal.

A change of structure moves no number: `metrics.jsonl` without times, `cuts.jsonl` and the final
weights of the dense job, its mixture-of-experts twin and a job of two ranks are compared bit for
bit. Metrics that only one side has are named and left out. The other commit's runs are kept in
outputs/compare/<commit> and made once.

    python scripts/compare_numbers.py <commit> [job ...]
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

JOBS = {
    "default": (1, ["train_configs/default.toml"]),
    "moe": (1, ["train_configs/default.toml", "train_configs/moe.toml"]),
    "two_ranks": (2, ["train_configs/default.toml", "train_configs/two_ranks.toml"]),
}
"""Name -> number of ranks, config files."""

FLAGS = ["--training.steps", "10", "--evaluation.num-problems", "64"]


def is_timing(key: str) -> bool:
    """Whether a metric depends on the clock or the machine."""
    return (
        key.endswith("_s")
        or key.startswith("memory/")
        or key in ("verification/step_frac", "train/mfu")
    )


def run_job(tree: Path, outputs: Path, job: str) -> Path:
    """Run one job of a source tree, unless it has ended there before; returns the run's folder."""
    done = list((outputs / job).glob("*/report.txt"))
    if done:
        return done[0].parent
    ranks, files = JOBS[job]
    configs = [word for file in files for word in ("--config", file)]
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    # The base model's last bits depend on the threads it is trained with: one for each number.
    base = outputs / f"base-{threads}"
    folders = ["--run.output-dir", str(outputs / job), "--prepare.cache-dir", str(base)]
    command = [sys.executable, "-m", "rollverify.launch", "--nproc", str(ranks), "--"]
    variables = {"PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": threads}
    print(f"{job} in {tree}", file=sys.stderr, flush=True)
    subprocess.run(
        [*command, *configs, *FLAGS, *folders],
        cwd=tree,
        env={**os.environ, **variables},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return next((outputs / job).glob("*/report.txt")).parent


def numbers_of(run: Path) -> dict[str, Any]:
    """What must be equal: metric lines without times, cut lines, bytes of the weights."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [
        json.dumps({key: value for key, value in json.loads(line).items() if not is_timing(key)})
        for line in lines
    ]
    cuts = [line for file in sorted(run.glob("cuts*.jsonl")) for line in file.open()]
    weights = sorted((run / "model").glob("*.safetensors"))
    return {
        "metrics.jsonl": metrics,
        "cuts.jsonl": cuts,
        "weights": b"".join(file.read_bytes() for file in weights),
    }


def without_new_metrics(there: list[str], here: list[str]) -> tuple[list[str], list[str], set[str]]:
    """Metric lines of both sides without the keys that a side never has, and those keys."""
    old, new = ([json.loads(line) for line in lines] for lines in (there, here))
    only = {key for row in old for key in row} ^ {key for row in new for key in row}
    kept = [
        [json.dumps({k: v for k, v in row.items() if k not in only}) for row in rows]
        for rows in (old, new)
    ]
    return kept[0], kept[1], only


def first_difference(there: list[str] | bytes, here: list[str] | bytes) -> str:
    """Where two values part, in words; for metric lines with the keys."""
    if isinstance(there, bytes) or len(there) != len(here):
        return f"{len(there)} against {len(here)}"
    at = next(index for index, pair in enumerate(zip(there, here, strict=True)) if len({*pair}) > 1)
    old, new = json.loads(there[at]), json.loads(here[at])
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return f"line {at + 1}, {', '.join(f'{k}: {old.get(k)} / {new.get(k)}' for k in keys[:5])}"


def main() -> int:
    """Compare; 1 where a number differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("jobs", nargs="*", metavar="job", help=", ".join(JOBS))
    arguments = parser.parse_args()
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.check_output([*git, "rev-parse", "--short", arguments.commit], text=True)
    there = ROOT / "outputs" / "compare" / commit.strip()
    tree = there / "tree"
    if not tree.exists():
        tree.mkdir(parents=True)
        archive = subprocess.check_output([*git, "archive", arguments.commit])
        subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
    here = there.parent / "here" / str(os.getpid())
    failed = False
    for job in arguments.jobs or JOBS:
        old = numbers_of(run_job(tree, there, job))
        new = numbers_of(run_job(ROOT, here, job))
        lines = without_new_metrics(old["metrics.jsonl"], new["metrics.jsonl"])
        old["metrics.jsonl"], new["metrics.jsonl"], only = lines
        if only:
            print(f"{job}: on one side only: {', '.join(sorted(only))}")
        for name in old:
            equal = old[name] == new[name]
            failed |= not equal
            how = "equal" if equal else f"differs: {first_difference(old[name], new[name])}"
            print(f"{job}: {name} ({len(old[name])}): {how}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
