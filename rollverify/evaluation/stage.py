"""Accuracy on the test set with the engine and weights of training.

One greedy response and k sampled ones per problem. Seeds depend on the problem alone, so two
evaluations of the same weights agree token for token. Does not touch the training prompts, and
leaves estimators and intervals to `rollverify.evaluation`.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from rollverify.engine.engine import Completion, RolloutEngine
from rollverify.engine.generation import problem_requests, request_name, run_requests
from rollverify.evaluation.records import ProblemRecord, ResponseRecord
from rollverify.evaluation.summary import summarize
from rollverify.hooks import StepState
from rollverify.metrics.statistics import sample_counts
from rollverify.ranks import gather_values
from rollverify.rollout.prompt_queue import EncodedPrompt

_PER_RESPONSE = 4
"""Right or not, tokens, cut or not, number of the answer."""
_NO_ANSWER = -1


def graded_problem(index: int, responses: Sequence[ResponseRecord]) -> ProblemRecord:
    """The record of a problem of which only the grades matter.

    Args:
        index: place in the test set.
        responses: the greedy one first.
    """
    greedy, *sampled = responses
    return ProblemRecord(index=index, problem_id="", gold="", greedy=greedy, sampled=tuple(sampled))


def gather_records(records: Sequence[ProblemRecord], num_samples: int) -> list[ProblemRecord]:
    """Join the records of all ranks.

    Collective: yes, over the world; those of `gather_values`.

    Args:
        records: of this rank's problems, with `num_samples` samples each; there may be none.
        num_samples: the same on every rank.

    Returns:
        Every problem once, by index; equal on every rank. Ranks that share a problem, as tensor
        ranks do, have the same record of it.
    """
    values = torch.tensor([value for one in records for value in _row(one)], dtype=torch.int64)
    if dist.is_initialized():
        group = dist.group.WORLD
        assert group is not None
        (values,) = gather_values([values], group)
    rows = values.view(-1, 1 + _PER_RESPONSE * (1 + num_samples)).tolist()
    by_index = {row[0]: _record(row) for row in rows}
    return [by_index[index] for index in sorted(by_index)]


def _row(record: ProblemRecord) -> list[int]:
    numbers: dict[str | None, int] = {None: _NO_ANSWER}
    row = [record.index]
    for one in (record.greedy, *record.sampled):
        answer = numbers.setdefault(one.answer, len(numbers))
        row += [one.is_right, one.num_tokens, one.finish_reason == "length", answer]
    return row


def _record(row: Sequence[int]) -> ProblemRecord:
    responses = [
        ResponseRecord(
            reward=float(right),
            num_tokens=num_tokens,
            finish_reason="length" if is_cut else "stop",
            answer=None if answer == _NO_ANSWER else str(answer),
        )
        for right, num_tokens, is_cut, answer in zip(*[iter(row[1:])] * _PER_RESPONSE, strict=True)
    ]
    return graded_problem(row[0], responses)


logger = logging.getLogger(__name__)


class Evaluation:
    """Hook at AFTER_WEIGHT_SYNC; `run` can be called directly, too."""

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        prompts: Sequence[EncodedPrompt],
        samples_per_problem: int,
        temperature: float,
        top_p: float,
        max_response_tokens: int,
        max_num_seqs: int,
        run_seed: int,
        every_steps: int,
        last_step: int,
        data_rank: int,
        data_world_size: int,
        answer_of: Callable[[Sequence[int]], str | None] | None = None,
        num_graders: int = 0,
    ) -> None:
        """Set up.

        Args:
            engine: idle engine.
            prompts: the test problems, the same on every rank; each rank takes its share.
            samples_per_problem: k of mean@k, >= 1.
            temperature: of the sampled responses, > 0.
            top_p: probability mass that they are drawn from, in (0, 1].
            max_response_tokens: limit of one response.
            max_num_seqs: the engine's slots.
            run_seed: seed of the run.
            every_steps: steps between evaluations; 0 for the last step only.
            last_step: evaluated in any case.
            data_rank: this rank's place among the data ranks.
            data_world_size: number of data ranks.
            answer_of: response ids -> text of the answer, which maj@k needs; None where the reward
                offers none.
            num_graders: problems graded at once, in threads; 0 grades one by one.
        """
        self._engine = engine
        self._prompts = list(enumerate(prompts))[data_rank::data_world_size]
        self._k = samples_per_problem
        self._temperature = temperature
        self._top_p = top_p
        self._max_response_tokens = max_response_tokens
        self._max_num_seqs = max_num_seqs
        self._run_seed = run_seed
        self._every_steps = every_steps
        self._last_step = last_step
        self._answer_of = answer_of
        self._num_graders = num_graders
        self.results: dict[int, dict[str, float]] = {}
        """Metrics by step; step 0 is the base model. Part of a checkpoint."""

    def __call__(self, state: StepState) -> None:
        """Evaluate when it is due. Collective: yes, over the world."""
        due = self._every_steps and state.step % self._every_steps == 0
        if due or state.step == self._last_step:
            state.metrics |= self.run(state.step)

    def run(self, step: int) -> dict[str, float]:
        """Evaluate now and remember the result.

        Args:
            step: steps taken so far.

        Returns:
            Metrics of `eval/`, the same on every rank.

        Source:
            Collective: yes, over the world.
        """
        requests = [
            request
            for index, prompt in self._prompts
            for request in problem_requests(
                index,
                prompt.token_ids,
                num_samples=self._k,
                temperature=self._temperature,
                top_p=self._top_p,
                max_response_tokens=self._max_response_tokens,
                run_seed=self._run_seed,
            )
        ]
        completions, _ = run_requests(self._engine, requests, self._max_num_seqs)
        # Else a resumed run, whose engine has no such keys and values, could round differently.
        self._engine.reset_prefix_cache()
        records = gather_records(list(self._graded(completions)), self._k)
        metrics = evaluation_metrics(records, has_answers=self._answer_of is not None)
        self.results[step] = metrics
        logger.info(
            "test set after step %d: greedy %.3f, mean@%d %.3f (95 %%: %.3f to %.3f)",
            step,
            metrics["eval/greedy_accuracy"],
            self._k,
            metrics[f"eval/mean_at_{self._k}"],
            metrics[f"eval/mean_at_{self._k}_low"],
            metrics[f"eval/mean_at_{self._k}_high"],
        )
        return metrics

    def _graded(self, completions: Mapping[str, Completion]) -> Iterator[ProblemRecord]:
        """Records of this rank's problems."""

        def grade(one: tuple[int, EncodedPrompt]) -> ProblemRecord:
            index, prompt = one
            names = [request_name(index, sample) for sample in range(self._k + 1)]
            return graded_problem(index, [self._response(prompt, completions[n]) for n in names])

        if not self._num_graders:
            yield from map(grade, self._prompts)
            return
        with ThreadPoolExecutor(self._num_graders, thread_name_prefix="grading") as threads:
            yield from threads.map(grade, self._prompts)

    def _response(self, prompt: EncodedPrompt, completion: Completion) -> ResponseRecord:
        return ResponseRecord(
            reward=prompt.grade(completion.token_ids),
            num_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
            answer=self._answer_of(completion.token_ids) if self._answer_of else None,
        )


def evaluation_metrics(records: Sequence[ProblemRecord], *, has_answers: bool) -> dict[str, float]:
    """Metrics of `eval/` from the records of all problems.

    Args:
        records: at least one, all with the same number of samples k.
        has_answers: whether the reward offers the text of an answer.
    """
    summary = summarize(records, has_answers=has_answers)
    sampled = [one for record in records for one in record.sampled]
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
