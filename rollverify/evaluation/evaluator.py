"""Generates and grades the responses to test problems, in training and on their own."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from rollverify.config.tables import EvaluationConfig
from rollverify.engine.engine import Completion, GenerationRequest, RolloutEngine
from rollverify.engine.generation import problem_requests, run_problems, sample_of
from rollverify.evaluation.records import (
    ProblemRecord,
    ResponseRecord,
    Responses,
    problem_record,
)
from rollverify.ranks import Ranks
from rollverify.rewards import Reward
from rollverify.rollout.prompt_queue import EncodedPrompt


@dataclass(kw_only=True)
class Evaluator:
    """One greedy response and k sampled ones per problem.

    Seeds depend on problem and sample alone, so two evaluations of the same weights agree token for
    token, but for the rounding of another batch.
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
    has_stopped: Callable[[], bool] = field(default=lambda: False)
    """Whether to leave the rest, looked at after every engine step."""

    def run(self, keep: Callable[[ProblemRecord], None]) -> None:
        """Pass each problem's record to `keep` once it is graded, one at a time, in any order.

        Records name neither a problem's id nor its answer. After an error `run` waits only for the
        problems whose grading has begun, and keeps them.

        Raises:
            RolloutError: see `run_problems`.
        """
        self.run_share(lambda index, responses: keep(problem_record(index, responses)), Ranks())

    def run_share(self, keep: Callable[[int, Responses], None], ranks: Ranks) -> None:
        """This rank's share of all responses, to `keep` by problem; see `run`.

        Single responses are dealt out: there are fewer problems than ranks in some test sets. The
        reward's threads, if it wants some, grade beside the engine.
        """
        by_index = {problem.prompt_index: problem for problem in self.problems}
        done = run_problems(self.engine, self._requests(ranks), self.max_num_seqs, self.has_stopped)
        if not self.reward.num_threads:
            for index, completions in done:
                keep(index, self._responses(by_index[index], completions))
            return
        lock = threading.Lock()

        def finish(problem: EncodedPrompt, completions: Sequence[Completion]) -> None:
            responses = self._responses(problem, completions)
            with lock:
                keep(problem.prompt_index, responses)

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

    def _requests(self, ranks: Ranks) -> Iterator[tuple[int, list[GenerationRequest]]]:
        """Each problem's requests that are this rank's, if there are any."""
        number = 0
        for problem in self.problems:
            requests = problem_requests(
                problem.prompt_index,
                problem.token_ids,
                num_samples=self.settings.samples_per_problem,
                temperature=self.settings.temperature,
                top_p=self.settings.top_p,
                max_response_tokens=self.max_response_tokens,
                run_seed=self.run_seed,
            )
            own = requests[(ranks.rank - number) % ranks.size :: ranks.size]
            number += len(requests)
            if own:
                yield problem.prompt_index, own

    def _responses(
        self, problem: EncodedPrompt, completions: Sequence[Completion]
    ) -> dict[int, ResponseRecord]:
        return {sample_of(done.request_id): self._response(problem, done) for done in completions}

    def _response(self, problem: EncodedPrompt, completion: Completion) -> ResponseRecord:
        text = self.decode(completion.token_ids)
        return ResponseRecord(
            reward=problem.grade(completion.token_ids),
            num_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
            answer=self.reward.answer_of(text),
            text=text if self.keeps_text else None,
        )
