"""Fills F_k with complete groups; partial rollouts pause the rest into U_k and resume it first.

On-policy, exactly one batch of groups is started and all of it is finished. Partial, more is in
flight than a batch needs; once enough groups are complete over all ranks every request is paused.
What counts as complete, and what becomes of groups that teach nothing, `dynamic_sampling` says.
Which requests run, and when a phase ends, depends on counts and seeds alone, never on the clock.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from rollverify.config.tables import DynamicSamplingConfig, RolloutConfig
from rollverify.engine.generation import GenerationStats
from rollverify.errors import EngineFailedError, RolloutStopped
from rollverify.ranks import Ranks
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.dynamic_sampling import GivenUp, GroupChoice
from rollverify.rollout.exchange import (
    Work,
    balance,
    balance_buffers,
    exchange,
    share_of_lowest,
)
from rollverify.rollout.ledger import PromptLedger, PromptState
from rollverify.rollout.prompt_queue import PromptQueue
from rollverify.rollout.requests import RequestLoop
from rollverify.rollout.trajectory import (
    check_verified,
    is_current,
    is_finished,
    is_routed,
    new_trajectory,
    num_tokens,
)
from rollverify.rollout.twins import Twins

logger = logging.getLogger(__name__)


def _never() -> bool:
    return False


@dataclass(kw_only=True)
class Rollouter:
    """The rollout phase of one rank."""

    loop: RequestLoop
    buffer: TrajectoryBuffer
    queue: PromptQueue
    ledger: PromptLedger
    rollout: RolloutConfig
    num_in_flight: int
    """Requests this rank keeps running in a partial phase, >= 1."""

    max_num_seqs: int
    is_on_policy: bool
    must_be_verified: bool
    """Refuse to resume tokens that were not verified against the policy now."""

    ranks: Ranks
    """With different responses."""

    twins: Twins = field(default_factory=Twins)
    work: Work = num_tokens
    """By which ranks share what is trained on and scored."""

    dynamic_sampling: DynamicSamplingConfig
    has_signal: Callable[[Tensor], bool]
    """Of a whole group's rewards [n], float32."""

    has_stopped: Callable[[], bool] = field(default_factory=lambda: _never, init=False)
    """Whether this rank must stop; a phase then ends within `rollout.count_every` steps."""

    num_dropped: int = field(default=0, init=False)
    """Groups sent back to the queue so far."""

    _in_training: list[int] = field(default_factory=list[int], init=False)

    def __post_init__(self) -> None:
        self._choice = GroupChoice(
            dynamic_sampling=self.dynamic_sampling,
            has_signal=self.has_signal,
            num_groups=self.rollout.prompts_per_step,
            buffer=self.buffer,
            ledger=self.ledger,
            ranks=self.ranks,
            settle=self.loop.settle,
            work=self.work,
        )

    @property
    def stats(self) -> GenerationStats:
        """What the engine did in the last phase, this rank."""
        return self.loop.stats

    @property
    def given_up(self) -> GivenUp | None:
        """Groups without signal in the last phase, this rank; None where all are trained on."""
        return self._choice.given_up

    def collect(self, policy_version: int) -> tuple[list[TensorDict], list[TensorDict]]:
        """Run one phase under the engine's version (RollVerify Section 4.1). Collective.

        Gives F_k (this rank's share: groups whole, balanced by tokens, by group and sample), and
        U_k. After an EngineFailedError (some engine failed twice), a NoSignalError or a
        RolloutStopped all that was generated is in the buffers, paused.
        """
        self._choice.begin()
        if self.is_on_policy:
            self._run_whole_batch(policy_version)
        else:
            self._run_until_enough(policy_version)
        chosen = self._choice.select()
        self._in_training = list(chosen[self.ranks.rank])
        mine = {g: self.buffer.pop_group(g, "trained") for g in self._in_training}
        self._move_all(self._in_training, PromptState.FINISHED)
        self._choice.give_up()
        mine = exchange(mine, balance(chosen), self.ranks)
        finished = [trajectory for members in mine.values() for trajectory in members]
        self.twins.check(finished)
        balance_buffers(self.buffer, self.ledger, self.ranks, self.work)
        return finished, self.buffer.trajectories()

    def mark_trained(self) -> None:
        """Tell the ledger that the optimizer step on the last F_k was taken."""
        self._move_all(self._in_training, PromptState.TRAINED)
        self._in_training = []

    def set_on_policy(self, is_on_policy: bool) -> None:
        """Change the mode of the next phase (RollVerify Section 4.3).

        Turning on-policy drops everything unfinished; its prompts return to the head of the queue
        and start again from nothing, with sampling streams not used before.
        """
        if is_on_policy:
            self._drop(lambda trajectory: False, "the run goes on on-policy")
        self.is_on_policy = is_on_policy

    def drop_older(self, policy_version: int, *, verified: bool) -> None:
        """Drop groups with older tokens; `verified` keeps those verified against this policy."""
        rule = partial(is_current, policy_version=policy_version, verified=verified)
        why = "tokens of an older policy" + verified * " were not verified against this one"
        self._drop(rule, why)

    def drop_unrouted(self, *, recorded_later: int | None) -> None:
        """Drop groups with unrecorded experts, unless of version `recorded_later`."""
        rule = partial(is_routed, except_version=recorded_later)
        self._drop(rule, "the experts of some tokens were not recorded")

    def state_dict(self) -> dict[str, int]:
        """JSON counts of this rank; the mode follows from the method and the acceptance window."""
        return {"num_dropped": self.num_dropped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.num_dropped = int(state["num_dropped"])

    def _run_whole_batch(self, policy_version: int) -> None:
        """Run this rank's share of a batch to the end; groups that teach nothing are replaced."""
        self.drop_older(policy_version, verified=False)
        while len(self.buffer.group_ids()) < self.rollout.prompts_per_step // self.ranks.size:
            self._draw_group()
        waiting = self._waiting(policy_version)
        self.loop.begin(policy_version, min(self.max_num_seqs, max(1, len(waiting))))
        failure = self._tried(lambda: self._start_all(waiting))
        while not self._is_over(failure, self.loop.num_in_flight):
            if not self._choice.num_running:
                failure = self._tried(lambda: self._start_all(self._refill()))
            failure = failure or self._tried(self._step_running)
        self._pause_all(failure)

    def _start_all(self, waiting: list[TensorDict]) -> None:
        for trajectory in waiting:
            self._start(trajectory)

    def _step_running(self) -> None:
        for _ in range(self._count_every):
            if self.loop.num_in_flight:
                self.loop.step()

    def _refill(self) -> list[TensorDict]:
        """Draw what the batch lacks: over all ranks the groups that come next by their ids."""
        missing = self._choice.num_missing
        num_mine = share_of_lowest(self.queue.upcoming(missing), missing, self.ranks)
        return [trajectory for _ in range(num_mine) for trajectory in self._draw_group()]

    def _run_until_enough(self, policy_version: int) -> None:
        """Keep the engine full until the ranks together hold a batch of complete groups."""
        waiting = deque(self._waiting(policy_version))
        self.loop.begin(policy_version, min(self.max_num_seqs, self.num_in_flight))
        failure = None
        while not self._is_over(failure):
            failure = self._tried(lambda: self._fill_and_step(waiting))
        self._pause_all(failure)

    def _fill_and_step(self, waiting: deque[TensorDict]) -> None:
        for _ in range(self._count_every):
            self._fill(waiting)
            self.loop.step()

    @property
    def _count_every(self) -> int:
        """Engine steps between two counts; one rank alone counts at each: it costs nothing."""
        return self.rollout.count_every if self.ranks.size > 1 else 1

    @staticmethod
    def _tried(action: Callable[[], None]) -> EngineFailedError | None:
        try:
            action()
        except EngineFailedError as error:
            return error
        return None

    def _is_over(self, failure: EngineFailedError | None, num_running: int = 0) -> bool:
        return self._choice.count(
            has_failed=failure is not None,
            has_stopped=self.has_stopped(),
            num_running=num_running,
        )

    def _pause_all(self, failure: EngineFailedError | None) -> None:
        """Take back what runs, if the engine answers. Collective.

        Raises everywhere if an engine failed or a rank was asked to stop.

        Over the world: twins may have an engine each.
        """
        try:
            self.loop.pause()
        except Exception:
            if failure is None:
                raise
        for group_id in self.buffer.group_ids():
            if self.ledger.state_of(group_id) is PromptState.RUNNING:
                self.ledger.move(group_id, PromptState.PAUSED)
        messages = Ranks.world().gather(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        for message in messages:
            if message is not None:
                raise EngineFailedError(f"another rank: {message}")
        if self._choice.is_stopping:
            raise RolloutStopped("the rollout was paused: the run was asked to stop")

    def _waiting(self, policy_version: int) -> list[TensorDict]:
        """Unfinished trajectories: those with tokens, then empty ones, by group and sample."""
        held = self.buffer.trajectories()
        if self.must_be_verified:
            # Finished responses that wait for their group are trained on later: they count too.
            check_verified(held, policy_version)
        unfinished = [trajectory for trajectory in held if not is_finished(trajectory)]
        return sorted(unfinished, key=lambda trajectory: len(trajectory["response_ids"]) == 0)

    def _fill(self, waiting: deque[TensorDict]) -> None:
        """Start requests until as many run as should; new groups when nothing waits."""
        while self.loop.num_in_flight < self.num_in_flight:
            if not waiting:
                waiting.extend(self._draw_group())
            self._start(waiting.popleft())

    def _start(self, trajectory: TensorDict) -> None:
        self.loop.start(trajectory)
        group_id = int(trajectory["group_id"])
        if self.ledger.state_of(group_id) is not PromptState.RUNNING:
            self.ledger.move(group_id, PromptState.RUNNING)

    def _move_all(self, group_ids: list[int], to: PromptState) -> None:
        for group_id in group_ids:
            self.ledger.move(group_id, to)

    def _draw_group(self) -> list[TensorDict]:
        """Draw a prompt and enter its group, without a token."""
        drawn = self.queue.draw()
        group = [
            new_trajectory(
                prompt_ids=drawn.prompt.token_ids,
                group_id=drawn.group_id,
                prompt_index=drawn.prompt.prompt_index,
                sample_index=sample,
                num_requests=drawn.num_requests,
            )
            for sample in range(self.buffer.group_size)
        ]
        self.buffer.add_group(group)
        if drawn.group_id not in self.ledger:  # It may have been drawn before and come back.
            self.ledger.add(drawn.group_id)
        return group

    def _drop(self, may_go_on: Callable[[TensorDict], bool], why: str) -> None:
        """Send groups back to the head of the queue in which some trajectory may not go on."""
        held = self.buffer.group_ids()
        dropped = [g for g in held if not all(map(may_go_on, self.buffer.group(g)))]
        for group_id in dropped:
            group = self.buffer.pop_group(group_id, "dropped")
            self.ledger.move(group_id, PromptState.PENDING)
            num_requests = max(int(trajectory["num_requests"]) for trajectory in group)
            self.queue.put_back(group_id, int(group[0]["prompt_index"]), num_requests)
        if dropped:
            logger.info("%d unfinished groups are dropped and start again: %s", len(dropped), why)
        self.num_dropped += len(dropped)
