"""The tables at the end of a run, from metrics.jsonl: accuracy, engine against trainer, time."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollverify.hooks import hook_time_key
from rollverify.metrics.names import phase_time_key
from rollverify.metrics.recorder import METRICS_FILE, TENSORBOARD_FOLDER


def summary_table(rows: Sequence[Sequence[str]]) -> str:
    """Align rows of cells, a header first: the first column left, the others right."""
    if not rows:
        return ""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([lines[0], rule, *lines[1:]])


PHASES = ("rollout", "train", "verify", "sync")
REPORT_FILE = "report.txt"
_MEAN_AT = re.compile(r"eval/mean_at_(\d+)")


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _labels(result: Mapping[str, float]) -> dict[str, str]:
    """Names of the metrics that are shown, by key: greedy, mean@n, pass@n and maj@n."""
    labels = {"eval/greedy_accuracy": "greedy accuracy"}
    for found in filter(None, map(_MEAN_AT.fullmatch, result)):
        num = found[1]
        labels |= {
            f"eval/mean_at_{num}": f"mean@{num}",
            f"eval/pass_at_{num}": f"pass@{num}",
            f"eval/maj_at_{num}": f"maj@{num}",
        }
    return {key: name for key, name in labels.items() if key in result}


def _accuracy_rows(results: dict[int, dict[str, float]]) -> list[list[str]]:
    first, last = results[min(results)], results[max(results)]
    labels = _labels(last)
    after = f"after step {max(results)}"
    if 0 not in results:  # A resumed run whose first part did not evaluate.
        return [["test set", after], *([name, _percent(last[key])] for key, name in labels.items())]
    rows = [["test set", "before", after, "change"]]
    for key, name in labels.items():
        # Another number of samples per problem since a resume gives another key.
        is_comparable = key in first
        change = f"{100 * (last[key] - first[key]):+.1f} points" if is_comparable else "-"
        before = _percent(first[key]) if is_comparable else "-"
        rows.append([name, before, _percent(last[key]), change])
    return rows


def _time_rows(steps: list[dict[str, float]], unlogged_s: Mapping[str, float]) -> list[list[str]]:
    total = sum(step.get("time/step_s", 0.0) for step in steps) + sum(unlogged_s.values())
    rows = [["phase", "seconds", "share"]]
    parts = {phase: sum(s.get(phase_time_key(phase), 0.0) for s in steps) for phase in PHASES}
    parts["evaluation"] = sum(step.get(hook_time_key("evaluation"), 0.0) for step in steps)
    parts["sync"] -= parts["evaluation"]
    parts["checkpoint"] = sum(step.get(phase_time_key("checkpoint"), 0.0) for step in steps)
    parts["checkpoint"] += unlogged_s.get("checkpoint", 0.0)
    for name, seconds in parts.items():
        rows.append([name, f"{seconds:.1f}", _percent(seconds / total) if total else "-"])
    rows.append(["all", f"{total:.1f}", _percent(1.0) if total else "-"])
    return rows


def _mismatch_rows(
    steps: list[dict[str, float]], segment_threshold: float | None
) -> list[list[str]]:
    """Of all trained tokens; none where no step has compared the two."""
    steps = [step for step in steps if "mismatch/ops_mean" in step]
    num_tokens = sum(step["train/num_tokens"] for step in steps)
    if not num_tokens:
        return []

    def mean(key: str) -> str:
        return f"{sum(step[key] * step['train/num_tokens'] for step in steps) / num_tokens:.2g}"

    rows = [
        ["engine against trainer, same weights", "per token"],
        ["mean |log ratio|, nats", mean("mismatch/logprob_abs_mean")],
        ["largest", f"{max(step['mismatch/logprob_abs_max'] for step in steps):.2g}"],
        ["mean |ratio - 1|, the noise floor of OPS", mean("mismatch/ops_mean")],
    ]
    if segment_threshold is not None:
        rows.append(["verification.segment_threshold, d_s", f"{segment_threshold:g}"])
    return rows


def final_report(
    folder: Path,
    results: dict[int, dict[str, float]],
    unlogged_s: Mapping[str, float],
    segment_threshold: float | None = None,
) -> str:
    """Print the tables, keep them as report.txt in the run folder and return them.

    `unlogged_s`: seconds by phase of what followed the last line, such as its checkpoint;
    `segment_threshold`: d_s, None where nothing is verified.
    """
    lines = (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    steps = [record for line in lines if (record := json.loads(line))["step"] > 0]
    parts = []
    if results:
        parts.append(summary_table(_accuracy_rows(results)))
    if rows := _mismatch_rows(steps, segment_threshold):
        parts.append(summary_table(rows))
    parts.append(summary_table(_time_rows(steps, unlogged_s)))
    events = folder / TENSORBOARD_FOLDER
    hint = f"   (tensorboard --logdir {events})" if events.is_dir() else ""
    parts.append(f"run folder: {folder}{hint}")
    text = "\n\n".join(parts)
    (folder / REPORT_FILE).write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)
    return text
