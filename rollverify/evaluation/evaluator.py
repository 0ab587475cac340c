"""Generates and grades the responses to test problems, in training and on their own."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from rollverify.config.tables import EvaluationConfig
from rollverify.engine.engine import Completion, RolloutEngine
from rollverify.engine.generation import problem_requests, run_problems
from rollverify.evaluation.records import ProblemRecord, ResponseRecord
from rollverify.rewards import Reward
from rollverify.rollout.prompt_queue import EncodedPrompt


@dataclass(kw_only=True)
class Evaluator:
    """One greedy response and k sampled ones per problem.

    Seeds depend on the problem alone, so two evaluations of the same weights agree token for token,
    but for the rounding of another batch.
    """

    engine: RolloutEngine
    """Idle between runs."""
    problems: Sequence[EncodedPrompt]
    settings: EvaluationConfig
    reward: Reward
    decode: Callable[[Sequence[int]], str]
    """Token ids of a response -> text."""
    max_response_tokens: int
    run_seed: int
    max_num_seqs: int | None = None
    """Requests up to which the engine is given the next problem; None gives it all at once."""
    keeps_text: bool = False
    """Whether records hold the text of the responses."""

    def run(self, keep: Callable[[ProblemRecord], None]) -> None:
        """Pass each problem's record to `keep` once it is graded, one at a time, in any order.

        Records name neither a problem's id nor its answer. The reward's threads, if it wants some,
        grade beside the engine. After an error `run` waits only for the problems whose grading has
        begun, and keeps them.

        Raises:
            RolloutError: see `run_problems`.
        """
        by_index = {problem.prompt_index: problem for problem in self.problems}
        requests = (
            (
                index,
                problem_requests(
                    index,
                    problem.token_ids,
                    num_samples=self.settings.samples_per_problem,
                    temperature=self.settings.temperature,
                    top_p=self.settings.top_p,
                    max_response_tokens=self.max_response_tokens,
                    run_seed=self.run_seed,
                ),
            )
            for index, problem in by_index.items()
        )
        done = run_problems(self.engine, requests, self.max_num_seqs)
        if not self.reward.num_threads:
            for index, completions in done:
                keep(self._record(by_index[index], completions))
            return
        lock = threading.Lock()

        def finish(problem: EncodedPrompt, completions: Sequence[Completion]) -> None:
            record = self._record(problem, completions)
            with lock:
                keep(record)

        begun: list[Future[None]] = []
        threads = ThreadPoolExecutor(self.reward.num_threads, "grading")
        try:
            for index, completions in done:
                begun.append(threads.submit(finish, by_index[index], completions))
                for future in [future for future in begun if future.done()]:
                    begun.remove(future)
                    future.result()
            for future in begun:
                future.result()
        finally:
            threads.shutdown(cancel_futures=True)

    def _record(self, problem: EncodedPrompt, completions: Sequence[Completion]) -> ProblemRecord:
        greedy, *sampled = (self._response(problem, completion) for completion in completions)
        return ProblemRecord(
            index=problem.prompt_index,
            problem_id="",
            gold="",
            greedy=greedy,
            sampled=tuple(sampled),
        )

    def _response(self, problem: EncodedPrompt, completion: Completion) -> ResponseRecord:
        text = self.decode(completion.token_ids)
        return ResponseRecord(
            reward=problem.grade(completion.token_ids),
            num_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
            answer=self.reward.answer_of(text),
            text=text if self.keeps_text else None,
        )
