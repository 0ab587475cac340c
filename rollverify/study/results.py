"""The runs of a study by arm: figures over seeds, the fitted cost model, accuracy at equal cost.

Reads no files and formats nothing.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollverify.metrics.statistics import Spread, spread
from rollverify.study.cost_model import CostFit, PhaseWork, accuracy_at, fit_cost
from rollverify.study.definition import Study
from rollverify.study.figures import FIGURES
from rollverify.study.phases import accuracy_over_cost, phase_works, work_of
from rollverify.study.records import RunRecord


@dataclass(kw_only=True, frozen=True)
class ArmResult:
    """All runs of an arm."""

    name: str
    label: str
    records: tuple[RunRecord, ...]
    """One per seed, in the order of the study; also of runs that are missing."""
    figures: Mapping[str, tuple[float | None, ...]]
    """Every figure of each run; None where its data are missing."""

    def values(self, figure: str) -> list[float]:
        """A figure of the runs that have it."""
        return [value for value in self.figures[figure] if value is not None]

    def spread(self, figure: str) -> Spread | None:
        """Mean and spread of a figure; None without values."""
        return spread(self.values(figure))

    def work(self) -> PhaseWork | None:
        """Mean work of a complete run; None without one."""
        found = [work for record in self.records if (work := work_of(record)) is not None]
        if not found:
            return None
        return PhaseWork(*(statistics.fmean(column) for column in zip(*found, strict=True)))


@dataclass(kw_only=True, frozen=True)
class Results:
    """All runs of a study."""

    study: Study
    arms: tuple[ArmResult, ...]
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
        records = [record for arm in self.arms for record in arm.records]
        return [f"{_place(record)}: {what}" for record in records for what in record.missing]


def _place(record: RunRecord) -> str:
    return f"{record.name} ({record.folder.name})" if record.folder else record.name


@dataclass(kw_only=True, frozen=True)
class EqualCost:
    """Accuracy of each arm when it has cost as much as the cheapest one in all."""

    budget: float
    """In units of c0, or seconds."""
    cheapest: str
    """Label of the arm that sets it."""
    accuracies: Mapping[str, tuple[float, ...]]
    """Of the runs of each arm that have one."""


def collect(study: Study, records: Sequence[RunRecord]) -> Results:
    """Group records by arm.

    Args:
        study: arms and seeds.
        records: one per run, in any order.
    """
    arms = []
    for arm in study.arms:
        own = sorted(
            (one for one in records if one.arm == arm.name),
            key=lambda record: study.seeds.index(record.seed),
        )
        figures = {
            name: tuple(figure.compute(record) for record in own)
            for name, figure in FIGURES.items()
        }
        arms.append(ArmResult(name=arm.name, label=arm.label, records=tuple(own), figures=figures))
    phases = [phase for record in records for phase in phase_works(record)]
    return Results(study=study, arms=tuple(arms), fit=fit_cost(phases))


def at_equal_cost(results: Results, ratio: float | None) -> EqualCost | None:
    """Compare the arms at the cost of the cheapest one.

    Args:
        results: of the study.
        ratio: c1 / c0; None counts measured seconds.

    Returns:
        The comparison; None if no run is complete and evaluated.
    """
    points = {
        arm.name: [
            found
            for record in arm.records
            if work_of(record) and (found := accuracy_over_cost(record, ratio))
        ]
        for arm in results.arms
    }
    totals = {
        name: statistics.fmean(one[-1][0] for one in runs) for name, runs in points.items() if runs
    }
    if not totals:
        return None
    cheapest = min(totals, key=lambda name: totals[name])
    budget = totals[cheapest]
    accuracies = {
        name: tuple(a for one in runs if (a := accuracy_at(one, budget)) is not None)
        for name, runs in points.items()
    }
    label = next(arm.label for arm in results.arms if arm.name == cheapest)
    return EqualCost(budget=budget, cheapest=label, accuracies=accuracies)
