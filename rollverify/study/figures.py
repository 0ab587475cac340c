"""The figures of one run, each with unit and meaning, and the quantities by step behind them."""

import math
import statistics
from typing import Any, NamedTuple

import pandas as pd

from rollverify.hooks import hook_time_key
from rollverify.study.cost_model import Work
from rollverify.study.records import RunRecord
from rollverify.study.status import GREEDY_KEY

LAST_STEPS = 5
"""Steps at the end of a run over which what fluctuates is averaged."""

OPS_KEY = "ops/trained_sequence_mean"


class Figure(NamedTuple):
    """One number of a run, with what it means."""

    label: str
    unit: str
    meaning: str


FIGURES = {
    "mean_at_k": Figure("mean@k", "share",
        "test accuracy after the last step, mean over the samples of each problem"),
    "greedy": Figure("greedy", "share", "test accuracy after the last step, greedy decoding"),
    "truncated": Figure("cut at the limit", "share",
        "sampled test responses that did not end within the length limit"),
    "reward": Figure("reward", "reward", f"mean reward of the last {LAST_STEPS} steps"),
    "entropy": Figure("entropy", "nats", f"mean entropy of the last {LAST_STEPS} steps"),
    "ops_mean": Figure("OPS", "1", "mean off-policy shift of trained responses, mean over steps"),
    "ops_peak": Figure("OPS, peak", "1",
        "mean off-policy shift of trained responses, the step with most"),
    "staleness_mean": Figure("staleness", "steps",
        "age of the oldest segment of trained responses, mean over steps"),
    "acceptance": Figure("acceptance", "share",
        "tokens of unfinished responses that verification keeps, mean over the steps that had any"),
    "cuts_segment": Figure("cuts, segment stage", "count",
        "responses cut by the segment threshold"),
    "cuts_token": Figure("cuts, token stage", "count", "responses cut by the token threshold"),
    "switched_at": Figure("switched at step", "step",
        "first step after which rollouts were on-policy"),
    "decode_steps": Figure("decode steps", "count", "engine steps of all rollout phases"),
    "slot_steps": Figure("slot-steps", "count", "active sequences, summed over the decode steps"),
    "idle_slot_steps": Figure("idle slot-steps", "count",
        "slots not in use, summed over the decode steps"),
    "tokens_generated": Figure("generated", "tokens", "response tokens that were sampled"),
    "tokens_trained": Figure("trained", "tokens", "response tokens that were trained on"),
    "tokens_regenerated": Figure("regenerated", "tokens",
        "response tokens that were cut, discarded or dropped"),
    "tokens_prefilled": Figure("read again", "tokens",
        "tokens of unfinished responses that the engine reads again to resume them"),
    "scoring_tokens": Figure("scored", "tokens",
        "response tokens of U_k before verification, times the scoring passes"),
    "generation_s": Figure("generation", "s", "rollout phases without their hooks"),
    "train_s": Figure("training", "s", "train phases"),
    "scoring_s": Figure("scoring", "s",
        "scoring of unfinished responses, also where it only measures"),
    "sync_s": Figure("weight sync", "s", "sync phases without evaluation and checkpoints"),
    "evaluation_s": Figure("evaluation", "s", "evaluations after step 0"),
    "method_s": Figure("all of the method", "s",
        "all phases without evaluation, checkpoints and scoring that only measures"),
}  # fmt: skip
"""Every figure of a run, by its name in files of numbers."""


def figures_of(run: RunRecord) -> dict[str, float | None]:
    """The numbers that `FIGURES` explains; None where data are missing."""
    final = run.evaluations.get(run.num_steps, {})
    is_verified = run.setting("method.name") == "rollverify" and len(run.steps) > 0
    cuts = [cut.get("rule") for cut in run.cuts] if is_verified else None
    switched = run.metric("switching/is_on_policy") > 0
    work, ops = work_of(run), run.metric(OPS_KEY)
    scoring = [run.metric(hook_time_key(name)) for name in ("anchor_scoring", "verification")]
    num_passes = scoring[0].notna().astype(int) + scoring[1].notna()
    checked = run.metric("verification/tokens_checked").fillna(0.0)

    def total(values: pd.Series) -> float:
        return sum(values) if run.is_complete else math.nan

    def mean(values: pd.Series, last: int = 0) -> float:
        found = (values.tail(last) if last else values).dropna()
        return statistics.fmean(found) if run.is_complete and len(found) else math.nan

    def so_far(fate: str) -> Any:
        return run.metric(f"tokens/{fate}").get(run.num_steps, math.nan)

    found = {
        "mean_at_k": final.get(mean_at_key(run)),
        "greedy": final.get(GREEDY_KEY),
        "truncated": final.get("eval/truncated_frac"),
        "reward": mean(run.metric("reward/mean"), LAST_STEPS),
        "entropy": mean(run.metric("train/entropy_nats"), LAST_STEPS),
        "ops_mean": mean(ops),
        "ops_peak": ops.max() if run.is_complete else None,
        "staleness_mean": mean(run.metric("staleness/trained_mean")),
        "acceptance": mean(acceptance(run)),
        "cuts_segment": cuts.count("segment") if cuts is not None else None,
        "cuts_token": cuts.count("token") if cuts is not None else None,
        "switched_at": switched.idxmax() if switched.any() else None,
        "decode_steps": total(run.metric("rollout/decode_steps")),
        "slot_steps": work.slot_steps if work else None,
        "idle_slot_steps": total(run.metric("rollout/idle_slot_steps")),
        "tokens_generated": so_far("generated"),
        "tokens_trained": so_far("trained"),
        "tokens_regenerated": so_far("cut") + so_far("discarded") + so_far("dropped"),
        "tokens_prefilled": total(run.metric("tokens/held")),
        "scoring_tokens": total(num_passes * checked),
        "generation_s": total(generation_s(run)),
        "train_s": total(run.metric("time/train_s")),
        "scoring_s": total(scoring_s(run)),
        "sync_s": total(sync_s(run)),
        "evaluation_s": total(run.hooks_s("evaluation")),
        "method_s": total(own_s(run)),
    }
    return {
        name: None if value is None or math.isnan(value) else float(value)
        for name, value in found.items()
    }


def mean_at_key(run: RunRecord) -> str:
    """Key of the mean accuracy over the samples of a problem."""
    return f"eval/mean_at_{run.setting('evaluation.samples_per_problem')}"


def num_problems(run: RunRecord) -> int:
    """Test problems in use, as far as the config tells."""
    asked = int(run.setting("evaluation.num_problems") or 0)
    if run.setting("data.test"):
        return asked
    return min(asked, int(run.setting("prepare.num_test_problems") or asked))


def acceptance(run: RunRecord) -> pd.Series:
    """Acceptance rate by step, of the steps that had something to verify."""
    has_any = run.metric("verification/tokens_checked") > 0
    return run.metric("verification/acceptance_rate").where(has_any).dropna()


def slot_steps(run: RunRecord) -> pd.Series:
    """Active sequences summed over decode steps, by phase, from idle slots and the busy share.

    Where none was idle they follow from the config.
    """
    idle, busy = run.metric("rollout/idle_slot_steps"), run.metric("rollout/engine_busy_frac")
    shared = (idle * busy / (1 - busy)).round()
    if not run.config:
        return shared.where(busy < 1)
    batch = run.setting("rollout.prompts_per_step") * run.setting("rollout.group_size")
    is_partial = run.setting("method.name") != "on_policy"
    most = math.ceil(run.setting("rollout.oversampling") * batch) if is_partial else batch
    in_flight = (run.metric("switching/is_on_policy") > 0).map({True: batch, False: most})
    slots = in_flight.clip(upper=run.setting("engine.max_num_seqs"))
    full = run.metric("rollout/decode_steps") * slots
    return shared.where(busy < 1, full.where((busy == 1) & idle.notna()))


def generation_s(run: RunRecord) -> pd.Series:
    """Seconds of each rollout phase without its hooks."""
    hooks_s = run.hooks_s("rollout_metrics", "anchor_scoring", "packing_noise", "slot_trace")
    return run.metric("time/rollout_s") - hooks_s


def scoring_s(run: RunRecord) -> pd.Series:
    """Seconds of each step's scoring passes over unfinished responses."""
    return run.metric("verification/scoring_s").fillna(0.0)


def sync_s(run: RunRecord) -> pd.Series:
    """Seconds of each sync phase without evaluation and, in early versions, checkpoints."""
    return run.metric("time/sync_s") - run.hooks_s("evaluation", "checkpointing")


def own_s(run: RunRecord) -> pd.Series:
    """Seconds of each step without evaluation, checkpoints and scoring that only measures."""
    seconds = run.metric("time/rollout_s") + run.metric("time/train_s")
    seconds = seconds + run.metric("time/verify_s") + sync_s(run)
    is_naive = run.setting("method.name") == "partial_rollout"
    measures_only = is_naive and run.setting("filter.name") != "ops"
    return seconds - scoring_s(run) if measures_only else seconds


def phases(run: RunRecord) -> pd.DataFrame:
    """A row per step with the columns of `Work`; no row at all if a step lacks one of them."""
    columns = (run.metric("rollout/decode_steps"), slot_steps(run), generation_s(run))
    work = pd.concat(columns, axis=1, keys=Work._fields)
    return work if len(work.dropna()) == len(work) else work.head(0)


def work_of(run: RunRecord) -> Work | None:
    """Work of all phases together; None if it is not known or the run is not complete."""
    work = phases(run)
    is_known = run.is_complete and len(work) > 0
    return Work(*(sum(work[name]) for name in Work._fields)) if is_known else None


def accuracy_points(run: RunRecord, ratio: float | None) -> list[tuple[float, float]]:
    """(Cost so far, mean accuracy) of each evaluation; in c0 by c1 / c0, in seconds if None."""
    work, key = phases(run), mean_at_key(run)
    spent = own_s(run) if ratio is None else work["decode_steps"] + ratio * work["slot_steps"]
    if work.empty or spent.hasnans or 0 not in run.evaluations:
        return []
    so_far = {0: 0.0, **spent.cumsum().to_dict()}
    found = {step: values.get(key) for step, values in sorted(run.evaluations.items())}
    return [(so_far[n], value) for n, value in found.items() if n in so_far and value is not None]
