"""What a study file may expect before any run, and whether it came out; undecided without data."""

from __future__ import annotations

import itertools
import statistics
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import BaseModel, Field

from rollverify.metrics.statistics import difference
from rollverify.study.cost_model import cost

if TYPE_CHECKING:
    from rollverify.study.results import ArmResult, Results


class Verdict(NamedTuple):
    """What came out."""

    text: str
    held: bool | None
    """None: the data do not tell."""
    detail: str
    """The numbers it was judged by."""


def judge(claim: Claim, results: Results) -> Verdict:
    """Whether a claim holds, by the rule of its kind."""
    arms = [arm for name in claim.names if (arm := results.arm(name)) is not None]
    if len(arms) < len(claim.names):
        return Verdict(claim.text, None, "an arm was not run")
    return Verdict(claim.text, *claim._rule(*arms))


class _Pair(BaseModel, extra="forbid", strict=True):
    text: str
    arm: str
    other: str

    @property
    def names(self) -> list[str]:
        return [self.arm, self.other]


class AccuracyClaim(_Pair):
    """Final accuracies of one arm against another's."""

    kind: Literal["accuracy_below", "accuracy_within_spread"]
    """Every seed below every seed of the other arm, or the mean not below its lowest seed."""

    def _rule(self, arm: ArmResult, other: ArmResult) -> tuple[bool | None, str]:
        ours, theirs = arm.values("mean_at_k"), other.values("mean_at_k")
        if not ours or not theirs:
            return None, "an arm has no final accuracy"
        gap = statistics.fmean(ours) - statistics.fmean(theirs)
        listed = [" / ".join(f"{value:.3f}" for value in values) for values in (ours, theirs)]
        detail = f"{listed[0]} against {listed[1]}; difference of means {gap:+.3f}"
        interval = difference(ours, theirs)
        if interval is not None:
            detail += f", 95 % interval [{interval.low:+.3f}, {interval.high:+.3f}]"
        if self.kind == "accuracy_below":
            return max(ours) < min(theirs), detail
        return statistics.fmean(ours) >= min(theirs), detail


class StepsClaim(_Pair):
    """fewer_decode_steps: mean decode steps of the other arm over ours reach the factor."""

    kind: Literal["fewer_decode_steps"]
    factor: float

    def _rule(self, arm: ArmResult, other: ArmResult) -> tuple[bool | None, str]:
        ours, theirs = arm.work(), other.work()
        if ours is None or theirs is None:
            return None, "an arm has no complete run"
        factor = theirs.decode_steps / ours.decode_steps
        numbers = f"{ours.decode_steps:,.0f} against {theirs.decode_steps:,.0f}"
        return factor >= self.factor, f"{numbers}: {factor:.2f} x fewer"


class CostClaim(_Pair):
    """cheaper: mean cost of decoding of the other arm over ours reaches the factor."""

    kind: Literal["cheaper"]
    factor: float
    ratio: float
    """c1 / c0 of the cost model."""

    def _rule(self, arm: ArmResult, other: ArmResult) -> tuple[bool | None, str]:
        ours, theirs = arm.work(), other.work()
        if ours is None or theirs is None:
            return None, "an arm has no complete run"
        factor = cost(theirs, self.ratio) / cost(ours, self.ratio)
        return factor >= self.factor, f"{factor:.2f} x cheaper at c1 / c0 = {self.ratio:g}"


class OpsClaim(BaseModel, extra="forbid", strict=True):
    """ops_order: mean OPS of what is trained on falls from each arm to the next."""

    text: str
    kind: Literal["ops_order"]
    arms: list[str]

    @property
    def names(self) -> list[str]:
        """The arms that it is about."""
        return self.arms

    def _rule(self, *arms: ArmResult) -> tuple[bool | None, str]:
        means = [found.mean for arm in arms if (found := arm.spread("ops_mean")) is not None]
        if len(means) < len(arms):
            return None, "an arm has no OPS"
        detail = ", ".join(f"{arm.label} {ops:.2g}" for arm, ops in zip(arms, means, strict=True))
        return all(a > b for a, b in itertools.pairwise(means)), detail


Claim = Annotated[AccuracyClaim | StepsClaim | CostClaim | OpsClaim, Field(discriminator="kind")]

CLAIM_KINDS: dict[str, type[BaseModel]] = {
    "accuracy_below": AccuracyClaim,
    "accuracy_within_spread": AccuracyClaim,
    "fewer_decode_steps": StepsClaim,
    "cheaper": CostClaim,
    "ops_order": OpsClaim,
}
