"""Accuracy on the test set with the engine and weights of training.

One greedy response and k sampled ones per problem. Seeds depend on the problem alone, so two
evaluations of the same weights agree token for token. Does not touch the training prompts.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from rollverify.evaluation.requests import problem_requests, request_name
from rollverify.metrics.reduction import reduce_metrics
from rollverify.rollout.engine import Completion, RolloutEngine
from rollverify.rollout.generation import run_requests
from rollverify.rollout.prompt_queue import EncodedPrompt
from rollverify.state import StepState

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
        sums: dict[str, float] = dict.fromkeys(
            ("problems", "greedy", "sampled", "tokens", "truncated"), 0.0
        )
        for rewards, answers in self._graded(completions):
            greedy, *sampled = (float(reward > 0) for reward in rewards)
            sums["problems"] += 1
            sums["greedy"] += greedy
            sums["sampled"] += sum(sampled)
            sums["tokens"] += sum(len(one.token_ids) for one in answers[1:])
            sums["truncated"] += sum(one.finish_reason == "length" for one in answers[1:])
        sums, _ = reduce_metrics(sums, {})
        num_samples = sums["problems"] * self._k
        metrics = {
            "eval/greedy_accuracy": sums["greedy"] / sums["problems"],
            f"eval/mean_at_{self._k}": sums["sampled"] / num_samples,
            "eval/response_tokens_mean": sums["tokens"] / num_samples,
            "eval/truncated_frac": sums["truncated"] / num_samples,
        }
        self.results[step] = metrics
        logger.info(
            "test set after step %d: greedy %.3f, mean@%d %.3f",
            step,
            metrics["eval/greedy_accuracy"],
            self._k,
            metrics[f"eval/mean_at_{self._k}"],
        )
        return metrics

    def _graded(
        self, completions: Mapping[str, Completion]
    ) -> Iterator[tuple[list[float], list[Completion]]]:
        """Rewards and responses of each problem, the greedy one first."""

        def grade(one: tuple[int, EncodedPrompt]) -> tuple[list[float], list[Completion]]:
            index, prompt = one
            answers = [completions[request_name(index, i)] for i in range(self._k + 1)]
            return [prompt.grade(answer.token_ids) for answer in answers], answers

        if not self._num_graders:
            yield from map(grade, self._prompts)
            return
        with ThreadPoolExecutor(self._num_graders, thread_name_prefix="grading") as threads:
            yield from threads.map(grade, self._prompts)
