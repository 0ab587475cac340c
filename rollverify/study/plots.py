"""Plots of a study, shaped like the paper's figures. Needs matplotlib; draws to files only.

Each function draws one figure from the results; what a run lacks is left out here, and named in
the report.
"""

import statistics
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rollverify.study.cost_model import cost
from rollverify.study.figures import OPS_KEY
from rollverify.study.phases import acceptance, accuracy_over_cost, phase_works, series
from rollverify.study.results import ArmResult, Results
from rollverify.study.tables import number

CURVES = (
    ("train/entropy_nats", "entropy (nats)"),
    ("reward/mean", "reward"),
    ("rollout/response_tokens_mean", "response length (tokens)"),
    (OPS_KEY, "OPS of trained responses"),
)
COLOURS = [f"C{place}" for place in range(10)]


def draw_all(results: Results, folder: Path) -> list[Path]:
    """Draw every figure for which there are data.

    Args:
        results: of the study.
        folder: takes the PNG files; made if missing.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, draw in PLOTS.items():
        figure = draw(results)
        if figure is None:
            continue
        file = folder / f"{name}.png"
        figure.savefig(file, dpi=100, metadata={"Software": None})
        plt.close(figure)
        files.append(file)
    return files


def accuracy_and_cost(results: Results) -> Figure | None:
    """Bars: final accuracy with a dot per seed, and cost of decoding at the smallest ratio."""
    if not any(arm.values("mean_at_k") for arm in results.arms):
        return None
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    ratio = results.study.ratios[0]
    for place, arm in enumerate(results.arms):
        found, work = arm.spread("mean_at_k"), arm.work()
        if found is not None:
            left.bar(place, found.mean, color=_colour(place), alpha=0.6)
            left.plot([place] * found.num, arm.values("mean_at_k"), "k.")
        if work is not None:
            right.bar(place, cost(work, ratio), color=_colour(place), alpha=0.6)
            right.text(place, cost(work, ratio), number(cost(work, ratio), "c0"), ha="center")
    left.set_ylabel("mean@k after the last step")
    right.set_ylabel(f"cost of decoding (c0), c1/c0 = {ratio:g}")
    for axes in (left, right):
        labels = [arm.label for arm in results.arms]
        axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right")
        axes.set_xlim(-0.6, len(labels) - 0.4)
        axes.margins(y=0.1)
    return figure


def curves(results: Results) -> Figure | None:
    """Entropy, reward, response length and OPS over steps: mean over seeds, range shaded."""
    figure, grid = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    drawn = False
    for axes, (key, label) in zip(grid.flat, CURVES, strict=True):
        for place, arm in enumerate(results.arms):
            drawn |= _band(axes, arm, key, place)
        axes.set(xlabel="step", ylabel=label)
    return _with_legend(figure, grid.flat[0]) if drawn else _dropped(figure)


def generation(results: Results) -> Figure | None:
    """Generation time and acceptance rate over steps."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    drawn = False
    for place, arm in enumerate(results.arms):
        times = [
            {number: work.seconds for number, work in enumerate(phase_works(record), 1)}
            for record in arm.records
        ]
        drawn |= _mean_line(left, [one for one in times if one], arm.label, place)
        rates = [found for record in arm.records if (found := acceptance(record))]
        _mean_line(right, rates, arm.label, place)
    left.set(xlabel="step", ylabel="generation time (s)")
    right.set(xlabel="step", ylabel="acceptance rate", ylim=(0, 1.02))
    return _with_legend(figure, left) if drawn else _dropped(figure)


def accuracy_over_cost_plot(results: Results) -> Figure | None:
    """Accuracy over the cost so far, one panel per ratio and one for this machine's clock."""
    ratios: list[float | None] = [*results.study.ratios, None]
    width = 3.4 * len(ratios)
    figure, grid = plt.subplots(1, len(ratios), figsize=(width, 3.6), layout="constrained")
    drawn = False
    for axes, ratio in zip(grid, ratios, strict=True):
        for place, arm in enumerate(results.arms):
            for index, record in enumerate(arm.records):
                points = accuracy_over_cost(record, ratio)
                if points:
                    drawn = True
                    label = arm.label if index == 0 else None
                    axes.plot(*zip(*points, strict=True), ".-", color=_colour(place), label=label)
        axes.set_xlabel("seconds here" if ratio is None else f"cost (c0), c1/c0 = {ratio:g}")
    grid[0].set_ylabel("mean@k")
    return _with_legend(figure, grid[0]) if drawn else _dropped(figure)


def lengths(results: Results) -> Figure | None:
    """Histogram of the lengths of all responses that were trained on."""
    found = {
        place: [length for one in arm.records for line in one.slots for length in line["lengths"]]
        for place, arm in enumerate(results.arms)
    }
    longest = max((max(one) for one in found.values() if one), default=0)
    if not longest:
        return None
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    bins = [longest * part / 40 for part in range(41)]
    for place, values in found.items():
        if values:
            label = results.arms[place].label
            axes.hist(
                values, bins, density=True, histtype="step", color=_colour(place), label=label
            )
    axes.set(xlabel="response length (tokens)", ylabel="share per token", yscale="log")
    return _with_legend(figure, axes)


def bubble(results: Results) -> Figure | None:
    """Active slots over the decode steps of one phase per arm: the middle step, first seed."""
    lines = {
        place: record.slots[len(record.slots) // 2]
        for place, arm in enumerate(results.arms)
        if (record := next((one for one in arm.records if one.slots), None)) is not None
    }
    if not lines:
        return None
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for place, line in lines.items():
        label = f"{results.arms[place].label}, step {line['step']}"
        axes.step(range(len(line["active"])), line["active"], color=_colour(place), label=label)
    axes.set(xlabel="decode step of the phase", ylabel="active slots", ylim=(0, None))
    return _with_legend(figure, axes)


def cost_model(results: Results) -> Figure | None:
    """Measured seconds per decode step over mean active sequences, and the fitted line."""
    if results.fit is None:
        return None
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    most = 0.0
    for place, arm in enumerate(results.arms):
        phases = [one for record in arm.records for one in phase_works(record) if one.decode_steps]
        active = [one.slot_steps / one.decode_steps for one in phases]
        step_ms = [1000 * one.seconds / one.decode_steps for one in phases]
        axes.plot(active, step_ms, ".", color=_colour(place), label=arm.label, alpha=0.5)
        most = max([most, *active])
    ends = [0.0, most]
    fitted = [1000 * (results.fit.c0_s + results.fit.c1_s * one) for one in ends]
    axes.plot(ends, fitted, "k-", label="c0 + c1 * active")
    axes.set(xlabel="active sequences, mean of a phase", ylabel="ms per decode step")
    return _with_legend(figure, axes)


PLOTS: dict[str, Callable[[Results], Figure | None]] = {
    "accuracy_and_cost": accuracy_and_cost,
    "accuracy_over_cost": accuracy_over_cost_plot,
    "curves": curves,
    "generation": generation,
    "lengths": lengths,
    "bubble": bubble,
    "cost_model": cost_model,
}
"""File name without suffix, and what draws it."""


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _band(axes: Axes, arm: ArmResult, key: str, place: int) -> bool:
    """Mean over seeds of a metric, their range shaded; whether there was any."""
    found = [values for record in arm.records if (values := series(record, key))]
    if not _mean_line(axes, found, arm.label, place):
        return False
    steps = sorted(set().union(*found))
    low = [min(one[step] for one in found if step in one) for step in steps]
    high = [max(one[step] for one in found if step in one) for step in steps]
    axes.fill_between(steps, low, high, color=_colour(place), alpha=0.2, linewidth=0)
    return True


def _mean_line(axes: Axes, found: list[dict[int, float]], label: str, place: int) -> bool:
    if not found:
        return False
    steps = sorted(set().union(*found))
    means = [statistics.fmean(one[step] for one in found if step in one) for step in steps]
    axes.plot(steps, means, color=_colour(place), label=label)
    return True


def _with_legend(figure: Figure, axes: Axes) -> Figure:
    axes.legend(fontsize="small")
    return figure


def _dropped(figure: Figure) -> None:
    plt.close(figure)
