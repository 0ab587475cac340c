"""Where a finished run spent its time: `python -m benchmarks.phases RUN_FOLDER`.

Reads metrics.jsonl only. Evaluation runs in the sync phase and is shown apart; a checkpoint follows
its step's line and is in the next step's. The weight transfer itself is `sync/push_s`.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.isolated import report
from rollverify.metrics.recorder import METRICS_FILE
from rollverify.metrics.report import PHASES

SEPARATE = {"evaluation": "time/hook/evaluation_s", "checkpoint": "time/checkpoint_s"}
"""Keys of what is shown apart, and left out of the bare step."""

SYNC_TARGET, VERIFY_TARGET = 0.01, 0.07
STARTUP_KEY = "time/startup_s"


def read_steps(folder: Path) -> tuple[list[dict[str, float]], float | None]:
    """Records of the training steps, and the start-up time if the run recorded one.

    Raises:
        SystemExit: with one line, if the folder holds no finished step.
    """
    try:
        lines = (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        sys.exit(f"error: {folder / METRICS_FILE}: {error.strerror}; give a run folder")
    records = [json.loads(line) for line in lines]
    startup_s = next((r[STARTUP_KEY] for r in records if STARTUP_KEY in r), None)
    steps = [record for record in records if record["step"] > 0]
    if not steps:
        sys.exit(f"error: {folder / METRICS_FILE} holds no training step yet")
    return steps, startup_s


def part_seconds(steps: list[dict[str, float]]) -> dict[str, list[float]]:
    """Seconds of each part by step; the parts add up to the step but for the loop's own code."""
    parts = {phase: [step[f"time/{phase}_s"] for step in steps] for phase in PHASES}
    parts["weight sync"] = [step["sync/push_s"] for step in steps]
    for name, key in SEPARATE.items():
        parts[name] = [step.get(key, 0.0) for step in steps]
    inside = ("weight sync", "evaluation")
    rest = zip(parts.pop("sync"), *(parts[name] for name in inside), strict=True)
    parts["other hooks after sync"] = [max(0.0, total - sum(known)) for total, *known in rest]
    return parts


def summary(steps: list[dict[str, float]]) -> tuple[list[list[str]], dict[str, Any]]:
    """Table and numbers.

    Shares are of all steps' time. The first step is left out of the medians where there are more,
    because it warms caches up.
    """
    total_s = sum(step["time/step_s"] for step in steps)
    steady = steps[1:] or steps
    rows = [["part", "seconds", "share", "median step"]]
    values: dict[str, Any] = {"steps": len(steps), "total_s": total_s}
    for name, seconds in part_seconds(steps).items():
        median_s = statistics.median(seconds[1:] or seconds)
        share = sum(seconds) / total_s
        rows.append([name, f"{sum(seconds):.2f}", f"{100 * share:.2f} %", f"{median_s:.3f} s"])
        values[name] = {"seconds": sum(seconds), "share": share, "median_s": median_s}
    median_s = statistics.median(step["time/step_s"] for step in steady)
    rows.append(["all", f"{total_s:.2f}", "100.00 %", f"{median_s:.3f} s"])
    apart = [sum(step.get(key, 0.0) for key in SEPARATE.values()) for step in steps]
    bare_s = total_s - sum(apart)
    values["sync_share"] = values["weight sync"]["seconds"] / bare_s
    values["verify_share"] = values["verify"]["seconds"] / bare_s
    for phase in ("rollout", "train"):
        tokens = sum(step[f"{phase}/num_tokens"] for step in steady)
        values[f"{phase}_tokens_per_s"] = tokens / sum(step[f"time/{phase}_s"] for step in steady)
    return rows, values


def main() -> None:
    """Print the table of a run folder."""
    parser = argparse.ArgumentParser(description="Where a run spent its time.")
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--output", type=Path, help="JSON file")
    arguments = parser.parse_args()
    steps, startup_s = read_steps(arguments.run_folder)
    rows, values = summary(steps)
    values["startup_s"] = startup_s
    print(
        f"{values['steps']} steps; of their time without evaluation and checkpoints: weight sync "
        f"{100 * values['sync_share']:.2f} % (target < {100 * SYNC_TARGET:.0f} %), verification "
        f"{100 * values['verify_share']:.2f} % (target <= {100 * VERIFY_TARGET:.0f} %)\n"
        f"rollout {values['rollout_tokens_per_s']:.0f} tokens/s, "
        f"train {values['train_tokens_per_s']:.0f} tokens/s; start-up "
        f"{'not recorded' if startup_s is None else f'{startup_s:.1f} s'}"
    )
    report(rows, values, arguments.output)


if __name__ == "__main__":
    main()
