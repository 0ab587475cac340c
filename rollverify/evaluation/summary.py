"""Sums up the records of one model, and compares those of two on the same problems."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rollverify.evaluation.records import ProblemRecord
from rollverify.metrics.statistics import (
    Interval,
    majority_at_k,
    mean_interval,
    pass_at_k,
    sample_counts,
    share_interval,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A number with its 95 % confidence interval over problems."""

    value: float
    """A share in [0, 1], or tokens."""
    interval: Interval | None = None
    """None where there is none to give."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One number of two models on the same problems."""

    difference: float
    """Mean over problems of the model's value minus the baseline's."""
    interval: Interval | None
    """95 % t-interval of that mean, from the paired differences; None if all are equal."""
    num_better: int
    """Problems on which the model has the larger value."""
    num_worse: int
    """Problems on which it has the smaller one."""


PerProblem = Callable[[ProblemRecord], float]


def shares_per_problem(num_samples: int, *, has_answers: bool) -> dict[str, PerProblem]:
    """The shares that are averaged over problems, by name; maj@k needs answers."""

    def passed(k: int) -> PerProblem:
        return lambda record: pass_at_k(num_samples, record.num_right, k)

    def voted(k: int) -> PerProblem:
        return lambda record: majority_at_k(
            [one.answer for one in record.sampled], [one.is_right for one in record.sampled], k
        )

    counts = sample_counts(num_samples)
    shares: dict[str, PerProblem] = {
        "greedy_accuracy": lambda record: float(record.greedy.is_right),
        f"avg_at_{num_samples}": lambda record: record.num_right / num_samples,
    }
    shares |= {f"pass_at_{k}": passed(k) for k in counts}
    # Of two responses the majority is the mean: both agree, or each counts half.
    shares |= {f"maj_at_{k}": voted(k) for k in counts if has_answers and k > 2}
    shares["truncated_frac"] = lambda record: statistics.fmean(
        [one.finish_reason == "length" for one in record.sampled]
    )
    return shares


def summarize(records: Sequence[ProblemRecord], *, has_answers: bool) -> dict[str, Estimate]:
    """Every number of one model, from at least one record, all with as many samples.

    Shares in [0, 1] and, named `response_tokens_...`, lengths of the sampled responses.
    """
    num_samples = len(records[0].sampled)
    summary: dict[str, Estimate] = {}
    for name, share in shares_per_problem(num_samples, has_answers=has_answers).items():
        values = [share(record) for record in records]
        interval = share_interval(values, num_samples)
        summary[name] = Estimate(value=statistics.fmean(values), interval=interval)
    return summary | _lengths(records)


def _lengths(records: Sequence[ProblemRecord]) -> dict[str, Estimate]:
    """Lengths of the sampled responses in tokens, of right and wrong ones apart too."""
    means = [statistics.fmean([one.num_tokens for one in record.sampled]) for record in records]
    every = [one for record in records for one in record.sampled]
    tokens = sorted(one.num_tokens for one in every)
    lengths = {
        "response_tokens_mean": Estimate(
            value=statistics.fmean(means), interval=mean_interval(means)
        ),
        "response_tokens_median": Estimate(value=statistics.median(tokens)),
        "response_tokens_max": Estimate(value=tokens[-1]),
    }
    for name, wanted in (("right", True), ("wrong", False)):
        some = [one.num_tokens for one in every if one.is_right is wanted]
        if some:
            lengths[f"response_tokens_{name}_mean"] = Estimate(value=statistics.fmean(some))
    return lengths


def compare(
    model: Mapping[int, ProblemRecord],
    baseline: Mapping[int, ProblemRecord],
    *,
    has_answers: bool,
) -> dict[str, Change]:
    """The model minus the baseline, from records of the same problems with as many samples."""
    num_samples = len(next(iter(model.values())).sampled)
    shares = shares_per_problem(num_samples, has_answers=has_answers)
    shares["response_tokens_mean"] = lambda one: statistics.fmean(
        [r.num_tokens for r in one.sampled]
    )
    changes: dict[str, Change] = {}
    for name, share in shares.items():
        differences = [share(model[index]) - share(baseline[index]) for index in model]
        changes[name] = Change(
            difference=statistics.fmean(differences),
            interval=mean_interval(differences),
            num_better=sum(one > 0 for one in differences),
            num_worse=sum(one < 0 for one in differences),
        )
    return changes
