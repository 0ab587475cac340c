"""Whether what a study file expected came out. The rules are fixed here, before any run.

A claim whose data are missing is neither held nor refuted.
"""

import itertools
import statistics
from collections.abc import Callable
from typing import NamedTuple

from rollverify.metrics.statistics import difference
from rollverify.study.cost_model import cost
from rollverify.study.definition import Claim
from rollverify.study.results import ArmResult, Results


class Verdict(NamedTuple):
    """What came out."""

    text: str
    """The claim."""
    held: bool | None
    """None: the data do not tell."""
    detail: str
    """The numbers it was judged by."""


def judge(claim: Claim, results: Results) -> Verdict:
    """Judge one claim.

    Args:
        claim: what was expected.
        results: what came out.
    """
    arms = [results.arm(name) for name in claim.arms]
    found = [arm for arm in arms if arm is not None]
    if len(found) < len(arms):
        return Verdict(claim.text, None, "an arm was not run")
    return _RULES[claim.kind](claim, found)


def _accuracies(claim: Claim, arms: list[ArmResult]) -> tuple[list[float], list[float], str]:
    ours, theirs = (arm.values("mean_at_k") for arm in arms)
    if not ours or not theirs:
        return ours, theirs, "an arm has no final accuracy"
    gap = statistics.fmean(ours) - statistics.fmean(theirs)
    detail = f"{_listed(ours)} against {_listed(theirs)}; difference of means {gap:+.3f}"
    interval = difference(ours, theirs)
    if interval is not None:
        detail += f", 95 % interval [{interval.low:+.3f}, {interval.high:+.3f}]"
    return ours, theirs, detail


def _accuracy_below(claim: Claim, arms: list[ArmResult]) -> Verdict:
    """Every seed of the arm lies below every seed of the other one."""
    ours, theirs, detail = _accuracies(claim, arms)
    held = max(ours) < min(theirs) if ours and theirs else None
    return Verdict(claim.text, held, detail)


def _accuracy_within_spread(claim: Claim, arms: list[ArmResult]) -> Verdict:
    """The arm's mean is not below the lowest seed of the other one."""
    ours, theirs, detail = _accuracies(claim, arms)
    held = statistics.fmean(ours) >= min(theirs) if ours and theirs else None
    return Verdict(claim.text, held, detail)


def _fewer_decode_steps(claim: Claim, arms: list[ArmResult]) -> Verdict:
    """Mean decode steps of the other arm over those of this one reach the factor."""
    ours, theirs = (arm.work() for arm in arms)
    if ours is None or theirs is None:
        return Verdict(claim.text, None, "an arm has no complete run")
    factor = theirs.decode_steps / ours.decode_steps
    detail = f"{ours.decode_steps:,.0f} against {theirs.decode_steps:,.0f}: {factor:.2f} x fewer"
    return Verdict(claim.text, factor >= claim.factor, detail)


def _cheaper(claim: Claim, arms: list[ArmResult]) -> Verdict:
    """Mean cost of decoding of the other arm over that of this one reaches the factor."""
    ours, theirs = (arm.work() for arm in arms)
    if ours is None or theirs is None:
        return Verdict(claim.text, None, "an arm has no complete run")
    factor = cost(theirs, claim.ratio) / cost(ours, claim.ratio)
    detail = f"{factor:.2f} x cheaper at c1 / c0 = {claim.ratio:g}"
    return Verdict(claim.text, factor >= claim.factor, detail)


def _ops_order(claim: Claim, arms: list[ArmResult]) -> Verdict:
    """Mean OPS of what is trained on falls from each arm to the next."""
    means = [arm.spread("ops_mean") for arm in arms]
    known = [one.mean for one in means if one is not None]
    if len(known) < len(arms):
        return Verdict(claim.text, None, "an arm has no OPS")
    held = all(a > b for a, b in itertools.pairwise(known))
    named = zip(arms, known, strict=True)
    return Verdict(claim.text, held, ", ".join(f"{arm.label} {ops:.2g}" for arm, ops in named))


_RULES: dict[str, Callable[[Claim, list[ArmResult]], Verdict]] = {
    "accuracy_below": _accuracy_below,
    "accuracy_within_spread": _accuracy_within_spread,
    "fewer_decode_steps": _fewer_decode_steps,
    "cheaper": _cheaper,
    "ops_order": _ops_order,
}


def _listed(values: list[float]) -> str:
    return " / ".join(f"{value:.3f}" for value in values)
