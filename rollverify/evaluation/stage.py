"""Accuracy on the test set with the engine and weights of training."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollverify.config.tables import EvaluationConfig
from rollverify.evaluation.evaluator import Evaluator
from rollverify.evaluation.records import ProblemRecord, Responses, problem_record
from rollverify.evaluation.summary import summarize
from rollverify.hooks import StepState
from rollverify.metrics.statistics import sample_counts
from rollverify.ranks import Ranks

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Evaluation:
    """Hook at AFTER_WEIGHT_SYNC; `run` can be called directly, too."""

    evaluator: Evaluator
    ranks: Ranks = field(default_factory=Ranks)
    """That deal out the responses; each has an engine, or a part of one."""
    last_step: int
    """Evaluated in any case."""
    results: dict[int, dict[str, float]] = field(
        default_factory=dict[int, dict[str, float]], init=False
    )
    """Metrics by step; step 0 is the base model. Part of a checkpoint."""

    is_pending: bool = field(default=False, init=False)
    """Whether the last one was stopped on its way, on some rank."""

    def __call__(self, state: StepState) -> None:
        """Evaluate when it is due. Collective over the world."""
        if self.is_due(state.step):
            state.metrics |= self.run(state.step)

    def is_due(self, step: int) -> bool:
        """Whether the policy of a step is evaluated."""
        evaluation: EvaluationConfig = self.evaluator.settings
        every_steps = evaluation.every_steps
        return step == self.last_step or bool(every_steps and step % every_steps == 0)

    def run(self, step: int) -> dict[str, float]:
        """Metrics of `eval/` now, `step` steps into the run; equal on every rank, and remembered.

        None if a rank was asked to stop meanwhile. Collective over the world.
        """
        mine: dict[int, Responses] = {}
        self.evaluator.run_share(mine.__setitem__, self.ranks)
        # Else a resumed run, whose engine has no such keys and values, could round differently.
        self.evaluator.engine.reset_prefix_cache()
        self.is_pending = bool(Ranks.patient().largest(int(self.evaluator.has_stopped())))
        if self.is_pending:
            return {}
        # Twins have the same share; each response counts once.
        responses: dict[int, Responses] = {}
        for share in Ranks.world().gather(mine):
            for index, some in share.items():
                responses.setdefault(index, {}).update(some)
        records = [problem_record(index, responses[index]) for index in sorted(responses)]
        metrics = evaluation_metrics(records, has_answers=self.evaluator.reward.has_answers)
        self.results[step] = metrics
        k = self.evaluator.settings.samples_per_problem
        logger.info(
            "test set after step %d: greedy %.3f, mean@%d %.3f (95 %%: %.3f to %.3f)",
            step,
            metrics["eval/greedy_accuracy"],
            k,
            metrics[f"eval/mean_at_{k}"],
            metrics[f"eval/mean_at_{k}_low"],
            metrics[f"eval/mean_at_{k}_high"],
        )
        return metrics


def evaluation_metrics(records: Sequence[ProblemRecord], *, has_answers: bool) -> dict[str, float]:
    """Metrics of `eval/`; at least one record, all with the same number of samples k."""
    summary = summarize(records, has_answers=has_answers)
    sampled = [response for record in records for response in record.sampled]
    k = len(records[0].sampled)
    interval = summary[f"avg_at_{k}"].interval
    assert interval is not None
    metrics = {
        "eval/greedy_accuracy": summary["greedy_accuracy"].value,
        f"eval/mean_at_{k}": sum(one.is_right for one in sampled) / len(sampled),
        "eval/response_tokens_mean": sum(one.num_tokens for one in sampled) / len(sampled),
        "eval/truncated_frac": sum(one.finish_reason == "length" for one in sampled) / len(sampled),
        f"eval/mean_at_{k}_low": interval.low,
        f"eval/mean_at_{k}_high": interval.high,
    }
    counts = sample_counts(k)
    metrics |= {f"eval/pass_at_{n}": summary[f"pass_at_{n}"].value for n in counts}
    voted = [n for n in counts if f"maj_at_{n}" in summary]
    return metrics | {f"eval/maj_at_{n}": summary[f"maj_at_{n}"].value for n in voted}
