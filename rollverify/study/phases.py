"""What each step of a run took: decode steps, slot-steps and seconds by what they were spent on.

Reads no files; `records` does.
"""

import math

from rollverify.hooks import hook_time_key
from rollverify.metrics.names import phase_time_key
from rollverify.study.cost_model import PhaseWork, cost, total_work
from rollverify.study.records import RunRecord


def mean_at_key(record: RunRecord) -> str:
    """Key of the mean accuracy over the samples of a problem."""
    return f"eval/mean_at_{record.setting('evaluation.samples_per_problem')}"


def num_problems(record: RunRecord) -> int:
    """Test problems in use, as far as the config tells."""
    asked = int(record.setting("evaluation.num_problems") or 0)
    if record.setting("data.test"):
        return asked
    return min(asked, int(record.setting("prepare.num_test_problems") or asked))


def phase_works(record: RunRecord) -> list[PhaseWork]:
    """Decode steps, slot-steps and seconds of generation of each step, in order.

    Returns:
        One entry per training step; none at all if a step lacks one of the numbers.
    """
    works = []
    for step in record.steps:
        slots, seconds = slot_steps(record, step), generation_s(step)
        decode_steps = step.get("rollout/decode_steps")
        if slots is None or seconds is None or decode_steps is None:
            return []
        works.append(PhaseWork(decode_steps, slots, seconds))
    return works


def work_of(record: RunRecord) -> PhaseWork | None:
    """Work of all phases together; None if it is not known or the run is not complete."""
    works = phase_works(record)
    is_whole = bool(works) and len(works) == record.num_steps
    return total_work(works) if is_whole else None


def accuracy_over_cost(record: RunRecord, ratio: float | None) -> list[tuple[float, float]]:
    """(cost so far, mean accuracy) of each evaluation, ascending.

    Args:
        record: of the run.
        ratio: c1 / c0 of the cost model, in units of c0; None counts measured seconds instead,
            without evaluations, checkpoints and scoring that only measures.
    """
    works = phase_works(record)
    if not works or 0 not in record.evaluations:
        return []
    spent, points, key = 0.0, [], mean_at_key(record)
    for number in range(len(works) + 1):
        if number:
            step = record.steps[number - 1]
            seconds = own_s(record, step)
            if ratio is None and seconds is None:
                return []
            spent += cost(works[number - 1], ratio) if ratio is not None else seconds or 0.0
        evaluation = record.evaluations.get(number, {})
        if key in evaluation:
            points.append((spent, evaluation[key]))
    return points


def series(record: RunRecord, key: str) -> dict[int, float]:
    """Values of a metric by step."""
    return {int(step["step"]): step[key] for step in record.steps if key in step}


def acceptance(record: RunRecord) -> dict[int, float]:
    """Acceptance rate by step, of the steps that had something to verify."""
    checked = series(record, "verification/tokens_checked")
    rates = series(record, "verification/acceptance_rate")
    return {step: rate for step, rate in rates.items() if checked.get(step)}


def is_measured_only(record: RunRecord) -> bool:
    """Whether unfinished responses are scored for the metrics alone, so that it is no cost."""
    is_partial = record.setting("method.name") == "partial_rollout"
    return is_partial and record.setting("filter.name") != "ops"


def slot_steps(record: RunRecord, step: dict[str, float]) -> float | None:
    """Active sequences summed over the decode steps, from the idle ones and the busy share."""
    idle, busy = step.get("rollout/idle_slot_steps"), step.get("rollout/engine_busy_frac")
    if idle is None or busy is None:
        return None
    if busy < 1:
        return round(idle * busy / (1 - busy))
    batch = int(record.setting("rollout.prompts_per_step")) * int(
        record.setting("rollout.group_size")
    )
    if record.setting("method.name") != "on_policy" and not step.get("switching/is_on_policy"):
        batch = math.ceil(record.setting("rollout.oversampling") * batch)
    slots = min(int(record.setting("engine.max_num_seqs")), batch)
    return slots * step["rollout/decode_steps"] if "rollout/decode_steps" in step else None


def generation_s(step: dict[str, float]) -> float | None:
    """Seconds of the rollout phase without its hooks."""
    if "time/rollout_s" not in step:
        return None
    hooks = ("rollout_metrics", "anchor_scoring", "slot_trace")
    return step["time/rollout_s"] - sum(step.get(hook_time_key(name), 0.0) for name in hooks)


def scoring_s(step: dict[str, float]) -> float:
    """Seconds of the scoring passes over unfinished responses."""
    return step.get("verification/scoring_s", 0.0)


def sync_s(step: dict[str, float]) -> float | None:
    """Seconds of the sync phase without evaluation and checkpoints."""
    if "time/sync_s" not in step:
        return None
    hooks = ("evaluation", "checkpointing")  # the second in records of earlier versions only
    return step["time/sync_s"] - sum(step.get(hook_time_key(name), 0.0) for name in hooks)


def own_s(record: RunRecord, step: dict[str, float]) -> float | None:
    """Seconds of a step without evaluation, checkpoints and scoring that only measures."""
    parts = [step.get(phase_time_key(phase)) for phase in ("rollout", "train", "verify")]
    parts.append(sync_s(step))
    if any(part is None for part in parts):
        return None
    measured = scoring_s(step) if is_measured_only(record) else 0.0
    return sum(part for part in parts if part is not None) - measured
