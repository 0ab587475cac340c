"""Plots of a study, shaped like the paper's figures; what a run lacks is left out."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rollverify.study.cost_model import cost
from rollverify.study.figures import OPS_KEY, acceptance, accuracy_points, phases
from rollverify.study.results import Results
from rollverify.study.tables import number

CURVES = {
    "train/entropy_nats": "entropy (nats)",
    "reward/mean": "reward",
    "rollout/response_tokens_mean": "response length (tokens)",
    OPS_KEY: "OPS of trained responses",
}


def draw_all(results: Results, folder: Path) -> list[Path]:
    """Draw every figure for which there are data into a folder; return the PNG files."""
    files = []
    for draw in PLOTS:
        figure = draw(results)
        if any(axes.has_data() for axes in figure.axes):
            files.append(folder / f"{draw.__name__}.png")
            figure.savefig(files[-1], dpi=100, metadata={"Software": None})
        plt.close(figure)
    return files


def accuracy_and_cost(results: Results) -> Figure:
    """Bars: final accuracy with a dot per seed, and cost of decoding at the smallest ratio."""
    figure, (left, right) = _panels(2)
    ratio = results.study.ratios[0]
    for place, arm in enumerate(results.arms):
        found, work = arm.spread("mean_at_k"), arm.work()
        if found is not None:
            left.bar(place, found.mean, color=_colour(place), alpha=0.6)
            left.plot([place] * found.num, arm.values("mean_at_k"), "k.")
        if work is not None:
            height = cost(work, ratio)
            right.bar(place, height, color=_colour(place), alpha=0.6)
            right.text(place, height, number(height, "c0"), ha="center")
    left.set_ylabel("mean@k after the last step")
    right.set_ylabel(f"cost of decoding (c0), c1/c0 = {ratio:g}")
    labels = [arm.label for arm in results.arms]
    for axes in (left, right):
        axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right")
        axes.set_xlim(-0.6, len(labels) - 0.4)
        axes.margins(y=0.1)
    return figure


def accuracy_over_cost(results: Results) -> Figure:
    """Accuracy over the cost so far, one panel per ratio and one for this machine's clock."""
    ratios = [*results.study.ratios, None]
    figure, panels = _panels(len(ratios), (3.4 * len(ratios), 3.6))
    for axes, ratio in zip(panels, ratios, strict=True):
        for place, arm in enumerate(results.arms):
            for index, record in enumerate(arm.records):
                points = accuracy_points(record, ratio)
                if points:
                    label = arm.label if index == 0 else None
                    axes.plot(*zip(*points, strict=True), ".-", color=_colour(place), label=label)
        axes.set_xlabel("seconds here" if ratio is None else f"cost (c0), c1/c0 = {ratio:g}")
    panels[0].set_ylabel("mean@k")
    return _with_legend(figure)


def curves(results: Results) -> Figure:
    """Entropy, reward, response length and OPS over steps: mean over seeds, range shaded."""
    figure, grid = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for axes, (key, label) in zip(grid.flat, CURVES.items(), strict=True):
        for place, arm in enumerate(results.arms):
            values = [record.metric(key).dropna() for record in arm.records]
            _mean_line(axes, values, arm.label, place, has_range=True)
        axes.set(xlabel="step", ylabel=label)
    return _with_legend(figure)


def generation(results: Results) -> Figure:
    """Generation time and acceptance rate over steps."""
    figure, (left, right) = _panels(2)
    for place, arm in enumerate(results.arms):
        seconds = [phases(record)["seconds"] for record in arm.records]
        _mean_line(left, seconds, arm.label, place)
        _mean_line(right, [acceptance(record) for record in arm.records], arm.label, place)
    left.set(xlabel="step", ylabel="generation time (s)")
    right.set(xlabel="step", ylabel="acceptance rate", ylim=(0, 1.02))
    return _with_legend(figure)


def lengths(results: Results) -> Figure:
    """Histogram of the lengths of all responses that were trained on."""
    figure, (axes,) = _panels(1)
    lines = [[line for record in arm.records for line in record.slots] for arm in results.arms]
    found = [[length for line in own for length in line["lengths"]] for own in lines]
    longest = max((max(values) for values in found if values), default=0)
    bins = [longest * part / 40 for part in range(41)]
    for place, (arm, values) in enumerate(zip(results.arms, found, strict=True)):
        if values:
            colour = _colour(place)
            axes.hist(values, bins, density=True, histtype="step", color=colour, label=arm.label)
    axes.set(xlabel="response length (tokens)", ylabel="share per token", yscale="log")
    return _with_legend(figure)


def bubble(results: Results) -> Figure:
    """Active slots over the decode steps of one phase per arm: the middle step, first seed."""
    figure, (axes,) = _panels(1)
    for place, arm in enumerate(results.arms):
        slots = next((record.slots for record in arm.records if record.slots), [])
        if slots:
            line = slots[len(slots) // 2]
            label = f"{arm.label}, step {line['step']}"
            axes.step(range(len(line["active"])), line["active"], color=_colour(place), label=label)
    axes.set(xlabel="decode step of the phase", ylabel="active slots", ylim=(0, None))
    return _with_legend(figure)


def cost_model(results: Results) -> Figure:
    """Measured seconds per decode step over mean active sequences, and the fitted line."""
    figure, (axes,) = _panels(1)
    if results.fit is None:
        return figure
    ends = [0.0, 0.0]
    for place, arm in enumerate(results.arms):
        found = pd.concat([phases(record) for record in arm.records])
        found = found[found["decode_steps"] > 0]
        active = found["slot_steps"] / found["decode_steps"]
        step_ms = 1000 * found["seconds"] / found["decode_steps"]
        axes.plot(active, step_ms, ".", color=_colour(place), label=arm.label, alpha=0.5)
        ends[1] = max([ends[1], *active])
    fitted = [1000 * (results.fit.c0_s + results.fit.c1_s * end) for end in ends]
    axes.plot(ends, fitted, "k-", label="c0 + c1 * active")
    axes.set(xlabel="active sequences, mean of a phase", ylabel="ms per decode step")
    return _with_legend(figure)


PLOTS = (accuracy_and_cost, accuracy_over_cost, curves, generation, lengths, bubble, cost_model)
"""In the order of the report; each draws the file of its name."""


def _panels(num: int, size: tuple[float, float] | None = None) -> tuple[Figure, list[Axes]]:
    size = size or (7 if num == 1 else 10, 4)
    figure, grid = plt.subplots(1, num, figsize=size, layout="constrained", squeeze=False)
    return figure, list(grid[0])


def _with_legend(figure: Figure) -> Figure:
    if figure.axes[0].has_data():
        figure.axes[0].legend(fontsize="small")
    return figure


def _colour(place: int) -> str:
    return f"C{place % 10}"


def _mean_line(
    axes: Axes,
    found: Sequence[pd.Series | pd.DataFrame],
    label: str,
    place: int,
    has_range: bool = False,
) -> None:
    """The mean over seeds of a metric by step, their range shaded if asked for."""
    values = pd.concat(found, axis=1).sort_index()
    if values.empty:
        return
    axes.plot(values.index, values.mean(axis=1), color=_colour(place), label=label)
    if has_range:
        low, high, colour = values.min(axis=1), values.max(axis=1), _colour(place)
        axes.fill_between(values.index, low, high, color=colour, alpha=0.2, linewidth=0)
