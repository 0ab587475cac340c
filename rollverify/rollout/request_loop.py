"""Runs requests for trajectories of the buffer: starts, steps, stores what comes back, pauses.

Does not decide which trajectory runs or when to stop; `rollouter.py` does.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Literal

from tensordict import TensorDict
from torch import Tensor

from rollverify.engine.engine import Completion, GenerationRequest, RolloutEngine
from rollverify.engine.generation import GenerationStats, request_seed
from rollverify.errors import EngineFailedError, RolloutError
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.prompt_queue import EncodedPrompt
from rollverify.rollout.trajectory import (
    Status,
    is_finished,
    join_routing,
    name_of,
    num_changed_rows,
    num_rows,
    status_after,
)

Grade = Callable[[], float]
"""Gives the reward of one response."""

Store = Callable[[float], None]
"""Takes it."""


class ResponseGrading:
    """The gradings of one rollout phase."""

    def __init__(self, num_threads: int = 0) -> None:
        """Set up.

        Args:
            num_threads: responses graded at once beside the engine; 0 grades at once and in place,
                which is faster for rewards that only compare texts.
        """
        self._threads = ThreadPoolExecutor(num_threads, "grading") if num_threads else None
        self._begun: list[tuple[Future[float], Store]] = []

    @property
    def is_beside(self) -> bool:
        """Whether responses are graded in threads."""
        return self._threads is not None

    def begin(self, grade: Grade, store: Store) -> None:
        """Grade a response.

        Args:
            grade: called once, in a thread if there are any.
            store: called once with the reward, in this thread, at the latest by `settle`.
        """
        if self._threads is None:
            store(grade())
        else:
            self._begun.append((self._threads.submit(grade), store))

    def settle(self) -> None:
        """Wait for everything that has begun and store it.

        Raises:
            Exception: what a grading raised; those after it are stored by the next call.
        """
        while self._begun:
            future, store = self._begun.pop(0)
            store(future.result())


logger = logging.getLogger(__name__)

ResumedRouting = Literal["keep", "replace"]
"""keep: rows stay those that tokens were sampled with. replace: rows of the new forward pass."""


class RequestLoop:
    """The requests of one rank's engine, one at most per trajectory."""

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        buffer: TrajectoryBuffer,
        prompts: Sequence[EncodedPrompt],
        max_response_tokens: int,
        stop_token_id: int,
        temperature: float,
        run_seed: int,
        mask_older: bool,
        routing: ResumedRouting | None = None,
        num_graders: int = 0,
    ) -> None:
        """Set up; nothing is started yet.

        Args:
            engine: idle; holds the policy's weights.
            buffer: holds the trajectories.
            prompts: the training set, to grade by `prompt_index`.
            max_response_tokens: limit of a whole response, over all its requests.
            stop_token_id: id that ends a response.
            temperature: > 0.
            run_seed: seed of the run.
            mask_older: True takes tokens of older versions out of the loss when a response is
                resumed.
            routing: the engine records the experts of every token, and what becomes of rows that a
                resumed response holds already; None where it records none.
            num_graders: responses graded at once beside the engine; 0: as they finish, in place.
        """
        self._engine = engine
        self._buffer = buffer
        self._prompts = prompts
        self._max_response_tokens = max_response_tokens
        self._stop_token_id = stop_token_id
        self._temperature = temperature
        self._run_seed = run_seed
        self._mask_older = mask_older
        self._routing: ResumedRouting | None = routing
        self._grading = ResponseGrading(num_graders)
        self._policy_version = 0
        self._slots = 0
        self._has_retried = False
        self._in_flight: dict[str, tuple[TensorDict, int]] = {}
        self.stats = GenerationStats()
        """Of the phase since `begin`."""

    def begin(self, policy_version: int, slots: int) -> None:
        """Start a phase with fresh stats.

        Args:
            policy_version: version the engine holds; new tokens get it, whenever they are read.
            slots: requests the engine could decode together in this phase.
        """
        self._policy_version = policy_version
        self._slots = slots
        self._has_retried = False
        self.stats = GenerationStats()

    @property
    def num_in_flight(self) -> int:
        """Requests started and not come back."""
        return len(self._in_flight)

    def start(self, trajectory: TensorDict) -> None:
        """Send a request for the rest of a response.

        Args:
            trajectory: unfinished, below the response limit.

        Raises:
            RolloutError: if the trajectory is finished or running.
            EngineFailedError: if the engine does not take the request.
        """
        name = f"{int(trajectory['group_id'])}/{int(trajectory['sample_index'])}"
        if name in self._in_flight or is_finished(trajectory):
            raise RolloutError(f"{name_of(trajectory)} is running or finished; it cannot start")
        response = trajectory["response_ids"].tolist()
        seed = request_seed(
            self._run_seed,
            int(trajectory["group_id"]),
            int(trajectory["sample_index"]),
            int(trajectory["num_requests"]),
        )
        request = GenerationRequest(
            request_id=name,
            token_ids=(*trajectory["prompt_ids"].tolist(), *response),
            max_tokens=self._max_response_tokens - len(response),
            seed=seed,
            temperature=self._temperature,
        )
        try:
            self._engine.add_request(request)
        except Exception as error:  # Whatever vLLM raises.
            raise EngineFailedError(_failure([trajectory], error)) from error
        self._in_flight[name] = (trajectory, seed)
        self.stats.num_resumed += bool(response)
        self.stats.num_started += int(trajectory["num_requests"]) == 0

    def step(self) -> list[TensorDict]:
        """Decode one token of every running request.

        The first failure of the engine in a phase is retried: all requests are paused and sent
        again with what they have.

        Returns:
            Trajectories that finished in this step.

        Raises:
            EngineFailedError: at the second failure, naming trajectories in flight.
            RolloutError: if the engine returns something that cannot be used.
        """
        self.stats.num_steps += 1
        self.stats.active.append(min(len(self._in_flight), self._slots))
        self.stats.slot_steps += self.stats.active[-1]
        self.stats.capacity += self._slots
        try:
            completions = self._engine.step()
        except Exception as error:  # Whatever vLLM or its kernels raise.
            return self._retry(error)
        finished = [self._store(completion) for completion in completions]
        if self._in_flight and not self._engine.num_unfinished:
            raise RolloutError(f"the engine lost requests {sorted(self._in_flight)[:3]}")
        return finished

    def pause(self) -> list[TensorDict]:
        """End every request and store what each has generated, maybe nothing; settle rewards.

        Returns:
            Trajectories that turn out to be finished.

        Raises:
            RolloutError: if the engine lost a request or could not end one.
        """
        try:
            return self._store_paused(self._engine.pause())
        finally:
            self.settle()

    def settle(self) -> None:
        """Wait for the rewards of finished responses; until then they may be 0."""
        self._grading.settle()

    def _retry(self, error: Exception) -> list[TensorDict]:
        running = [trajectory for trajectory, _ in self._in_flight.values()]
        if self._has_retried:
            raise EngineFailedError(_failure(running, error)) from error
        self._has_retried = True
        logger.warning(
            "the engine failed (%s: %s); %d requests are paused and sent again",
            type(error).__name__,
            error,
            len(running),
        )
        try:
            completions = self._engine.pause()
        except Exception as second:
            raise EngineFailedError(_failure(running, second)) from second
        finished = self._store_paused(completions)
        for trajectory in running:
            if not is_finished(trajectory):
                self.start(trajectory)
        return finished

    def _store_paused(self, completions: list[Completion]) -> list[TensorDict]:
        stored = [self._store(completion) for completion in completions]
        if self._in_flight:
            lost = sorted(self._in_flight)
            raise RolloutError(f"the engine lost {len(lost)} requests at the pause: {lost[:3]}")
        return list(filter(is_finished, stored))

    def _store(self, completion: Completion) -> TensorDict:
        """Append what a request generated, and grade the response if that ends it."""
        if completion.request_id not in self._in_flight:
            raise RolloutError(f"the engine returned unknown request '{completion.request_id}'")
        trajectory, seed = self._in_flight.pop(completion.request_id)
        self._buffer.append(
            trajectory,
            completion.token_ids,
            completion.logprobs,
            policy_version=self._policy_version,
            seed=seed,
            mask_older=self._mask_older,
        )
        self.stats.num_tokens += len(completion.token_ids)
        if self._routing is not None and completion.token_ids:
            self._store_routing(trajectory, completion.routed_experts, self._routing)
        response = trajectory["response_ids"].tolist()
        status = status_after(
            response, stop_token_id=self._stop_token_id, max_tokens=self._max_response_tokens
        )
        if status is Status.UNFINISHED and completion.finish_reason != "paused":
            raise RolloutError(
                f"{name_of(trajectory)}: the engine says '{completion.finish_reason}' after "
                f"{len(response)} tokens, but neither stop token nor limit was reached"
            )
        if status is not Status.UNFINISHED:
            self._grade(trajectory, status, response)
        return trajectory

    def _grade(self, trajectory: TensorDict, status: Status, response: list[int]) -> None:
        if self._grading.is_beside:
            self._buffer.set_outcome(trajectory, status, 0.0)
        prompt = self._prompts[int(trajectory["prompt_index"])]
        self._grading.begin(
            partial(prompt.grade, response),
            lambda reward: self._buffer.set_outcome(trajectory, status, reward),
        )

    def _store_routing(
        self, trajectory: TensorDict, given: Tensor | None, rule: ResumedRouting
    ) -> None:
        if given is None:
            raise RolloutError(
                f"{name_of(trajectory)}: the engine gave tokens without their experts; routing "
                "replay needs an engine that records them"
            )
        self.stats.num_held_rows += num_rows(trajectory)
        self.stats.num_changed_rows += num_changed_rows(trajectory, given)
        join_routing(trajectory, given, replace=rule == "replace")


def _failure(trajectories: list[TensorDict], error: Exception) -> str:
    names = ", ".join(name_of(trajectory) for trajectory in trajectories[:3])
    reason = (str(error).splitlines() or [""])[0]
    return (
        f"the rollout engine failed and a retry did not help ({type(error).__name__}: {reason}) "
        f"with {len(trajectories)} trajectories: {names}"
    )
