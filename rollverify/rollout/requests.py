"""Runs requests for trajectories of the buffer: starts, steps, stores what comes back, pauses."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from rollverify.config.tables import RolloutConfig
from rollverify.engine.engine import Completion, GenerationRequest, RolloutEngine
from rollverify.engine.generation import GenerationStats, request_seed
from rollverify.errors import EngineFailedError, RolloutError, TwinsError
from rollverify.ranks import Ranks
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

logger = logging.getLogger(__name__)

Grade = Callable[[], float]

Store = Callable[[float], None]

ResumedRouting = Literal["keep", "replace"]
"""keep: rows stay those that tokens were sampled with. replace: rows of the new forward pass."""


class ResponseGrading:
    """Gradings of one phase: in threads beside the engine, or in place, faster for cheap ones.

    What is graded in threads may depend on the clock, so of the members of one engine the first
    grades and tells the others.
    """

    def __init__(self, num_threads: int = 0, members: Ranks | None = None) -> None:
        self._members = members or Ranks()
        self._threads = ThreadPoolExecutor(num_threads, "grading") if num_threads else None
        self._begun: list[tuple[Future[float] | None, Store]] = []

    @property
    def is_beside(self) -> bool:
        """Whether responses are graded in threads."""
        return self._threads is not None

    def begin(self, grade: Grade, store: Store) -> None:
        """Grade a response; `store` gets its reward in this thread, at the latest by `settle`."""
        if self._threads is None:
            store(grade())
        else:
            is_first = self._members.rank == 0
            self._begun.append((self._threads.submit(grade) if is_first else None, store))

    def settle(self) -> None:
        """Wait for what has begun and store it; after an error the next call stores the rest.

        Collective over the members.
        """
        while self._begun:
            number = len(self._begun) if self._members.size > 1 else 1
            begun, self._begun = self._begun[:number], self._begun[number:]
            rewards = [future.result() for future, _ in begun if future is not None]
            for (_, store), reward in zip(begun, self._members.from_first(rewards), strict=True):
                store(reward)


@dataclass(kw_only=True)
class RequestLoop:
    """The requests of one rank's engine, one at most per trajectory."""

    engine: RolloutEngine
    buffer: TrajectoryBuffer
    prompts: Sequence[EncodedPrompt]
    """By `prompt_index`."""

    rollout: RolloutConfig
    stop_token_ids: tuple[int, ...]
    run_seed: int
    routing: ResumedRouting | None = None
    """What becomes of rows that a resumed response holds; None where none are recorded."""

    num_graders: int = 0
    """Threads; 0: in place."""

    members: Ranks = field(default_factory=Ranks)
    """Ranks that hold the engine together, this one among them."""

    stats: GenerationStats = field(default_factory=GenerationStats, init=False)
    """Since `begin`."""

    _policy_version: int = field(default=0, init=False)
    _slots: int = field(default=0, init=False)
    _has_retried: bool = field(default=False, init=False)
    _in_flight: dict[str, tuple[TensorDict, int]] = field(
        default_factory=dict[str, tuple[TensorDict, int]], init=False
    )
    """Trajectory and seed by request id."""

    def __post_init__(self) -> None:
        self._grading = ResponseGrading(self.num_graders, self.members)

    def begin(self, policy_version: int, slots: int) -> None:
        """Start a phase with fresh stats; `slots` requests could be decoded together."""
        self._policy_version = policy_version
        self._slots = slots
        self._has_retried = False
        self.stats = GenerationStats()

    @property
    def num_in_flight(self) -> int:
        """Requests started and not come back."""
        return len(self._in_flight)

    def start(self, trajectory: TensorDict) -> None:
        """Send a request for the rest of a response."""
        group_id, sample = int(trajectory["group_id"]), int(trajectory["sample_index"])
        name, num_requests = f"{group_id}/{sample}", int(trajectory["num_requests"])
        if name in self._in_flight or is_finished(trajectory):
            raise RolloutError(f"{name_of(trajectory)} is running or finished; it cannot start")
        response = trajectory["response_ids"]
        request = GenerationRequest(
            request_id=name,
            token_ids=tuple(torch.cat([trajectory["prompt_ids"], response]).tolist()),
            max_tokens=self.rollout.max_response_tokens - len(response),
            seed=request_seed(self.run_seed, group_id, sample, num_requests),
            temperature=self.rollout.temperature,
        )
        try:
            self.engine.add_request(request)
        except Exception as error:  # Whatever vLLM raises.
            raise EngineFailedError(_failure([trajectory], error)) from error
        self._in_flight[name] = (trajectory, request.seed)
        if len(response):
            self.stats.num_resumed += 1
            self.stats.tokens_resumed += len(request.token_ids)
        self.stats.num_started += num_requests == 0

    def step(self) -> list[TensorDict]:
        """Decode one token of every running request; return what finished.

        The first failure of the engine in a phase is retried: all requests are paused and sent
        again with what they have. The second is an EngineFailedError.
        """
        self.stats.num_steps += 1
        self.stats.active.append(min(len(self._in_flight), self._slots))
        self.stats.slot_steps += self.stats.active[-1]
        self.stats.capacity += self._slots
        try:
            completions = self.engine.step()
        except TwinsError:
            raise
        except Exception as error:  # Whatever vLLM or its kernels raise.
            return self._retry(error)
        finished = [self._store(completion) for completion in completions]
        if self._in_flight and not self.engine.num_unfinished:
            raise RolloutError(f"the engine lost requests {sorted(self._in_flight)[:3]}")
        return finished

    def pause(self) -> list[TensorDict]:
        """End every request, store what each has generated and its reward; return what finished."""
        try:
            return self._store_paused(self.engine.pause())
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
            completions = self.engine.pause()
        except Exception as second:
            raise EngineFailedError(_failure(running, second)) from second
        finished = self._store_paused(completions)
        for trajectory in running:
            if not is_finished(trajectory):
                self.start(trajectory)
        return finished

    def _store_paused(self, completions: list[Completion]) -> list[TensorDict]:
        self.stats.num_lost += self.engine.num_lost_tokens
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
        self.buffer.append(
            trajectory,
            completion.token_ids,
            completion.logprobs,
            policy_version=self._policy_version,
            seed=seed,
            mask_older=self.rollout.mask_older_segments,
        )
        self.stats.num_tokens += len(completion.token_ids)
        if self.routing is not None and completion.token_ids:
            self._store_routing(trajectory, completion.routed_experts, self.routing)
        response = trajectory["response_ids"]
        status = status_after(
            response,
            stop_token_ids=self.stop_token_ids,
            max_tokens=self.rollout.max_response_tokens,
        )
        if status is not Status.UNFINISHED:
            self._grade(trajectory, status)
        elif completion.finish_reason != "paused":
            raise RolloutError(
                f"{name_of(trajectory)}: the engine says '{completion.finish_reason}' after "
                f"{len(response)} tokens, but no stop token and no limit was reached"
            )
        return trajectory

    def _grade(self, trajectory: TensorDict, status: Status) -> None:
        if self._grading.is_beside:
            self.buffer.set_outcome(trajectory, status, 0.0)
        prompt = self.prompts[int(trajectory["prompt_index"])]
        self._grading.begin(
            partial(prompt.grade, trajectory["response_ids"].tolist()),
            lambda reward: self.buffer.set_outcome(trajectory, status, reward),
        )

    def _store_routing(
        self, trajectory: TensorDict, given: Tensor | None, rule: ResumedRouting
    ) -> None:
        """Take in the rows [F, L, K] of a whole context."""
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
