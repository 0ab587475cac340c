"""The figures of one run, each with unit and meaning; one whose data are missing is None.

Compares no runs and reads no files.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollverify.hooks import hook_time_key
from rollverify.study.phases import (
    acceptance,
    generation_s,
    mean_at_key,
    own_s,
    scoring_s,
    series,
    sync_s,
    work_of,
)
from rollverify.study.records import RunRecord
from rollverify.study.status import GREEDY_KEY

LAST_STEPS = 5
"""Steps at the end of a run over which what fluctuates is averaged."""

OPS_KEY = "ops/trained_sequence_mean"


@dataclass(kw_only=True, slots=True, frozen=True)
class Figure:
    """One number of a run, with what it means."""

    label: str
    unit: str
    meaning: str
    compute: Callable[[RunRecord], float | None]


def _total(part: Callable[[dict[str, float]], float | None]) -> Callable[..., float | None]:
    """Sum of a part of each step over a complete run."""

    def compute(record: RunRecord) -> float | None:
        values = [part(step) for step in record.steps]
        if not values or len(values) != record.num_steps or any(v is None for v in values):
            return None
        return sum(value for value in values if value is not None)

    return compute


def _over_steps(
    key: str, reduce: Callable[[Sequence[float]], float], last: int | None = None
) -> Callable[..., float | None]:
    """A statistic of a metric over the steps of a complete run, or its last ones, that have it."""

    def compute(record: RunRecord) -> float | None:
        if len(record.steps) != record.num_steps:
            return None
        found = series(record, key)
        wanted = [v for step, v in found.items() if not last or step > record.num_steps - last]
        return reduce(wanted) if wanted else None

    return compute


def _final(key: Callable[[RunRecord], str]) -> Callable[..., float | None]:
    return lambda record: record.evaluations.get(record.num_steps, {}).get(key(record))


def _last(key: str) -> Callable[..., float | None]:
    """A cumulative metric at the last step of a complete run."""
    return lambda record: series(record, key).get(record.num_steps)


def _cuts(rule: str) -> Callable[..., float | None]:
    def compute(record: RunRecord) -> float | None:
        if record.setting("method.name") != "rollverify" or not record.steps:
            return None
        return float(sum(cut.get("rule") == rule for cut in record.cuts))

    return compute


def _acceptance(record: RunRecord) -> float | None:
    rates = list(acceptance(record).values())
    return statistics.fmean(rates) if rates and len(record.steps) == record.num_steps else None


def _switched_at(record: RunRecord) -> float | None:
    steps = [s for s, on in series(record, "switching/is_on_policy").items() if on]
    return float(min(steps)) if steps else None


def _regenerated(record: RunRecord) -> float | None:
    lost = [_last(f"tokens/{fate}")(record) for fate in ("cut", "discarded", "dropped")]
    return None if None in lost else sum(one for one in lost if one is not None)


def _scoring_tokens(step: dict[str, float]) -> float | None:
    """Response tokens of the scoring passes: one over U_k, and the anchor pass where it runs."""
    passes = sum(hook_time_key(name) in step for name in ("anchor_scoring", "verification"))
    return passes * step.get("verification/tokens_checked", 0.0)


FIGURES: dict[str, Figure] = {
    "mean_at_k": Figure(
        label="mean@k", unit="share", compute=_final(mean_at_key),
        meaning="test accuracy after the last step, mean over the samples of each problem",
    ),
    "greedy": Figure(
        label="greedy", unit="share", compute=_final(lambda _: GREEDY_KEY),
        meaning="test accuracy after the last step, greedy decoding",
    ),
    "truncated": Figure(
        label="cut at the limit", unit="share", compute=_final(lambda _: "eval/truncated_frac"),
        meaning="sampled test responses that did not end within the length limit",
    ),
    "reward": Figure(
        label="reward", unit="reward",
        compute=_over_steps("reward/mean", statistics.fmean, LAST_STEPS),
        meaning=f"mean reward of the last {LAST_STEPS} steps",
    ),
    "entropy": Figure(
        label="entropy", unit="nats",
        compute=_over_steps("train/entropy_nats", statistics.fmean, LAST_STEPS),
        meaning=f"mean entropy of the last {LAST_STEPS} steps",
    ),
    "ops_mean": Figure(
        label="OPS", unit="1", compute=_over_steps(OPS_KEY, statistics.fmean),
        meaning="mean off-policy shift of trained responses, mean over steps",
    ),
    "ops_peak": Figure(
        label="OPS, peak", unit="1", compute=_over_steps(OPS_KEY, max),
        meaning="mean off-policy shift of trained responses, the step with most",
    ),
    "staleness_mean": Figure(
        label="staleness", unit="steps",
        compute=_over_steps("staleness/trained_mean", statistics.fmean),
        meaning="age of the oldest segment of trained responses, mean over steps",
    ),
    "acceptance": Figure(
        label="acceptance", unit="share", compute=_acceptance,
        meaning="tokens of unfinished responses that verification keeps, mean over the steps that "
        "had any",
    ),
    "cuts_segment": Figure(
        label="cuts, segment stage", unit="count", compute=_cuts("segment"),
        meaning="responses cut by the segment threshold",
    ),
    "cuts_token": Figure(
        label="cuts, token stage", unit="count", compute=_cuts("token"),
        meaning="responses cut by the token threshold",
    ),
    "switched_at": Figure(
        label="switched at step", unit="step", compute=_switched_at,
        meaning="first step after which rollouts were on-policy",
    ),
    "decode_steps": Figure(
        label="decode steps", unit="count",
        compute=_total(lambda step: step.get("rollout/decode_steps")),
        meaning="engine steps of all rollout phases",
    ),
    "slot_steps": Figure(
        label="slot-steps", unit="count",
        compute=lambda record: work.slot_steps if (work := work_of(record)) else None,
        meaning="active sequences, summed over the decode steps",
    ),
    "idle_slot_steps": Figure(
        label="idle slot-steps", unit="count",
        compute=_total(lambda step: step.get("rollout/idle_slot_steps")),
        meaning="slots not in use, summed over the decode steps",
    ),
    "tokens_generated": Figure(
        label="generated", unit="tokens", compute=_last("tokens/generated"),
        meaning="response tokens that were sampled",
    ),
    "tokens_trained": Figure(
        label="trained", unit="tokens", compute=_last("tokens/trained"),
        meaning="response tokens that were trained on",
    ),
    "tokens_regenerated": Figure(
        label="regenerated", unit="tokens", compute=_regenerated,
        meaning="response tokens that were cut, discarded or dropped",
    ),
    "tokens_prefilled": Figure(
        label="read again", unit="tokens", compute=_total(lambda step: step.get("tokens/held")),
        meaning="tokens of unfinished responses that the engine reads again to resume them",
    ),
    "scoring_tokens": Figure(
        label="scored", unit="tokens", compute=_total(_scoring_tokens),
        meaning="response tokens of U_k before verification, times the scoring passes",
    ),
    "generation_s": Figure(
        label="generation", unit="s", compute=_total(generation_s),
        meaning="rollout phases without their hooks",
    ),
    "train_s": Figure(
        label="training", unit="s", compute=_total(lambda step: step.get("time/train_s")),
        meaning="train phases",
    ),
    "scoring_s": Figure(
        label="scoring", unit="s", compute=_total(scoring_s),
        meaning="scoring of unfinished responses, also where it only measures",
    ),
    "sync_s": Figure(
        label="weight sync", unit="s", compute=_total(sync_s),
        meaning="sync phases without evaluation and checkpoints",
    ),
    "evaluation_s": Figure(
        label="evaluation", unit="s",
        compute=_total(lambda step: step.get(hook_time_key("evaluation"), 0.0)),
        meaning="evaluations after step 0",
    ),
    "method_s": Figure(
        label="all of the method", unit="s",
        compute=lambda record: _total(lambda step: own_s(record, step))(record),
        meaning="all phases without evaluation, checkpoints and scoring that only measures",
    ),
}  # fmt: skip
"""Every figure of a run, by its name in files of numbers."""
