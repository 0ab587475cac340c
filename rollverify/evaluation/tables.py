"""An evaluation as a table for the terminal and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rollverify.evaluation.contamination import Overlap
from rollverify.evaluation.summary import Change, Estimate
from rollverify.metrics.report import summary_table
from rollverify.metrics.statistics import Interval


def estimate_json(summary: Mapping[str, Estimate]) -> dict[str, Any]:
    """Value and interval of each number: {"avg_at_8": {"value": ..., "low": ..., "high": ...}}."""
    return {name: {"value": one.value, **_ends(one.interval)} for name, one in summary.items()}


def change_json(changes: Mapping[str, Change]) -> dict[str, Any]:
    """Difference, interval and counts of each number."""
    return {
        name: {
            "difference": one.difference,
            **_ends(one.interval),
            "problems_better": one.num_better,
            "problems_worse": one.num_worse,
        }
        for name, one in changes.items()
    }


def overlap_json(
    overlaps: Sequence[Overlap], ngram: int, num_problems: int, clean: Mapping[str, Any]
) -> dict[str, Any]:
    """What the contamination check of `num_problems` test problems found.

    `clean` has the numbers of each model on the other problems, by name; it is empty where that
    makes no difference or none is left.
    """
    return {
        "ngram": ngram,
        "problems": num_problems,
        "overlapping": len(overlaps),
        "overlaps": [asdict(one) for one in overlaps],
        "without_overlapping": dict(clean),
    }


def one_model_table(summary: Mapping[str, Estimate]) -> str:
    """Rows `name  value  95 % interval`."""
    rows = [["", "value", "95 % interval"]]
    for name, one in summary.items():
        rows.append([_label(name), _value(name, one.value), _interval(name, one.interval)])
    return summary_table(rows)


def two_model_table(
    model: Mapping[str, Estimate], baseline: Mapping[str, Estimate], changes: Mapping[str, Change]
) -> str:
    """Rows `name  baseline  model  change  95 % interval of the change  better  worse`."""
    rows = [["", "baseline", "model", "change", "95 % interval", "better", "worse"]]
    for name, one in model.items():
        base = _value(name, baseline[name].value) if name in baseline else "-"
        row = [_label(name), base, _value(name, one.value)]
        change = changes.get(name)
        if change is None:
            row += ["-", "-", "-", "-"]
        else:
            row += [_signed(name, change.difference), _interval(name, change.interval, signed=True)]
            row += [str(change.num_better), str(change.num_worse)]
        rows.append(row)
    return summary_table(rows)


def overlap_line(report: Mapping[str, Any]) -> str:
    """One line about the contamination check."""
    line = (
        f"contamination: {report['overlapping']} of {report['problems']} problems share "
        f"{report['ngram']} words in a row, or all they have, with a training problem"
    )
    names = [one["test_id"] for one in report["overlaps"]]
    if names:
        line += f" ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
    for model, numbers in report["without_overlapping"].items():
        name = next(key for key in numbers if key.startswith("avg_at_"))
        line += f"; without them {model} {_label(name)} {_value(name, numbers[name]['value'])}"
    return line


def _ends(interval: Interval | None) -> dict[str, float | None]:
    low, high = interval or (None, None)
    return {"low": low, "high": high}


def _label(name: str) -> str:
    return name.replace("_at_", "@").replace("_frac", "").replace("_", " ")


def _is_tokens(name: str) -> bool:
    return name.startswith("response_tokens")


def _value(name: str, value: float) -> str:
    return f"{value:.1f}" if _is_tokens(name) else f"{100 * value:.1f} %"


def _signed(name: str, value: float) -> str:
    return f"{value:+.1f}" if _is_tokens(name) else f"{100 * value:+.1f}"


def _interval(name: str, interval: Interval | None, *, signed: bool = False) -> str:
    if interval is None:
        return "-"
    scale = 1 if _is_tokens(name) else 100
    low, high = (f"{scale * end:{'+' if signed else ''}.1f}" for end in interval)
    return f"{low} .. {high}"
