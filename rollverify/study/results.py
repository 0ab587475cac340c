"""The runs of a study by arm: figures over seeds, the fitted cost model, accuracy at equal cost."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd

from rollverify.metrics.statistics import Spread, spread
from rollverify.study.cost_model import CostFit, Work, accuracy_at, fit_cost
from rollverify.study.figures import FIGURES, accuracy_points, figures_of, phases, work_of
from rollverify.study.records import RunRecord
from rollverify.study.study_file import Study


@dataclass(frozen=True)
class ArmResult:
    """All runs of an arm."""

    name: str
    label: str
    records: list[RunRecord]
    """One per seed, in the order of the study; also of runs that are missing."""
    figures: dict[str, list[float | None]]
    """Every figure of each run; None where its data are missing."""

    def values(self, figure: str) -> list[float]:
        """A figure of the runs that have it."""
        return [value for value in self.figures[figure] if value is not None]

    def spread(self, figure: str) -> Spread | None:
        """Mean and spread of a figure; None without values."""
        return spread(self.values(figure))

    def work(self) -> Work | None:
        """Mean work of a complete run; None without one."""
        found = [work for record in self.records if (work := work_of(record)) is not None]
        return Work(*map(statistics.fmean, zip(*found, strict=True))) if found else None


@dataclass(frozen=True)
class Results:
    """All runs of a study."""

    study: Study
    arms: list[ArmResult]
    fit: CostFit | None
    """Of the phases of all runs together."""

    def arm(self, name: str) -> ArmResult | None:
        """The arm of that name; None where only others were looked at."""
        return next((arm for arm in self.arms if arm.name == name), None)

    @property
    def baseline(self) -> ArmResult | None:
        """The arm that others are compared with."""
        return self.arm(self.study.baseline)

    @property
    def missing(self) -> list[str]:
        """What is missing, each line with the run and its folder."""
        return [
            f"{record.name}{f' ({record.folder.name})' if record.folder else ''}: {what}"
            for arm in self.arms
            for record in arm.records
            for what in record.missing
        ]


def collect(study: Study, records: Sequence[RunRecord]) -> Results:
    """Group records, in the order of the plan, by arm."""
    arms = []
    for arm in study.arms:
        own = [record for record in records if record.arm == arm.name]
        found = [figures_of(record) for record in own]
        figures = {name: [values[name] for values in found] for name in FIGURES}
        arms.append(ArmResult(arm.name, arm.label, own, figures))
    return Results(study, arms, fit_cost(pd.concat([phases(record) for record in records])))


class EqualCost(NamedTuple):
    """Accuracy of each arm when it has cost as much as the cheapest one in all."""

    budget: float
    """In units of c0, or seconds."""
    cheapest: str
    """Label of the arm that sets it."""
    accuracies: dict[str, list[float]]
    """Of the runs of each arm that have one."""


def at_equal_cost(results: Results, ratio: float | None) -> EqualCost | None:
    """Compare the arms at the cost of the cheapest by c1 / c0, or by measured seconds if None."""
    points = {
        arm.name: [
            found
            for record in arm.records
            if record.is_complete and (found := accuracy_points(record, ratio))
        ]
        for arm in results.arms
    }
    totals = {
        arm.label: statistics.fmean(run[-1][0] for run in points[arm.name])
        for arm in results.arms
        if points[arm.name]
    }
    if not totals:
        return None
    cheapest, budget = min(totals.items(), key=lambda total: total[1])
    accuracies = {
        name: [a for run in runs if (a := accuracy_at(run, budget)) is not None]
        for name, runs in points.items()
    }
    return EqualCost(budget, cheapest, accuracies)
