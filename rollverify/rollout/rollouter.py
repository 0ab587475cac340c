"""Fills F_k with complete groups; partial rollouts pause the rest into U_k and resume it first.

On-policy, exactly one batch of groups is started and all of it is finished. Partial, more is in
flight than a batch needs; once enough groups are complete over all ranks every request is paused.
What counts as complete, and what becomes of groups that teach nothing, `dynamic_sampling` says.
Which requests run, and when a phase ends, depends on counts and seeds alone, never on the clock.
Does not verify or cut: hooks do, between two calls of `collect`.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from tensordict import TensorDict

from rollverify.engine.generation import GenerationStats
from rollverify.errors import EngineFailedError
from rollverify.ranks import agree_on_failure
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.dynamic_sampling import GivenUp, GroupChoice, SignalRule
from rollverify.rollout.exchange import (
    balance,
    balance_buffers,
    check_twins,
    draw_group,
    drop_groups,
    exchange,
    share_of_lowest,
)
from rollverify.rollout.ledger import PromptLedger, PromptState
from rollverify.rollout.prompt_queue import PromptQueue
from rollverify.rollout.request_loop import RequestLoop
from rollverify.rollout.trajectory import check_verified, is_current, is_finished, is_routed


class Rollouter:
    """The rollout phase of one rank."""

    def __init__(
        self,
        *,
        loop: RequestLoop,
        buffer: TrajectoryBuffer,
        queue: PromptQueue,
        ledger: PromptLedger,
        prompts_per_step: int,
        group_size: int,
        num_in_flight: int,
        max_num_seqs: int,
        count_every: int,
        is_on_policy: bool,
        must_be_verified: bool,
        data_rank: int,
        data_world_size: int,
        data_group: dist.ProcessGroup | None,
        signal_rule: SignalRule | None = None,
    ) -> None:
        """Set up; nothing is drawn yet.

        Args:
            loop: runs the requests; shares the buffer.
            buffer: groups drawn and not yet trained on.
            queue: prompts.
            ledger: where each prompt is.
            prompts_per_step: groups of one batch, over all ranks.
            group_size: responses per prompt.
            num_in_flight: requests this rank keeps running in a partial phase, >= 1.
            max_num_seqs: the engine's slots.
            count_every: engine steps between two counts of complete groups; one rank always counts.
            is_on_policy: start in on-policy mode.
            must_be_verified: refuse to resume tokens that were not verified against the policy now.
            data_rank: this rank's place among the data ranks.
            data_world_size: number of data ranks; divides `prompts_per_step`.
            data_group: the data ranks; None where there is one.
            signal_rule: gives up groups that teach nothing; None trains on every complete group.
        """
        self._loop = loop
        self._buffer = buffer
        self._queue = queue
        self._ledger = ledger
        self._prompts_per_step = prompts_per_step
        self._group_size = group_size
        self._num_in_flight = num_in_flight
        self._max_num_seqs = max_num_seqs
        self._count_every = count_every if data_group is not None else 1
        self.is_on_policy = is_on_policy
        """Whether the next phase is on-policy."""

        self._must_be_verified = must_be_verified
        self._data_rank = data_rank
        self._data_world_size = data_world_size
        self._data_group = data_group
        self._in_training: list[int] = []
        self._choice = GroupChoice(
            rule=signal_rule,
            num_groups=prompts_per_step,
            buffer=buffer,
            ledger=ledger,
            data_group=data_group,
            settle=loop.settle,
        )
        self.num_dropped = 0
        """Groups sent back to the queue at a switch so far, this rank."""

    @property
    def stats(self) -> GenerationStats:
        """What the engine did in the last phase, this rank."""
        return self._loop.stats

    @property
    def given_up(self) -> GivenUp | None:
        """Groups without signal in the last phase, this rank; None where all are trained on."""
        return self._choice.given_up

    def collect(self, policy_version: int) -> tuple[list[TensorDict], list[TensorDict]]:
        """Run one rollout phase.

        Args:
            policy_version: version the engine holds.

        Returns:
            (F_k, this rank's share: groups whole, balanced by tokens, by group and sample;
            U_k, what stays in this rank's buffer).

        Raises:
            UnverifiedTrajectoryError: if a response would go on without verification.
            EngineFailedError: if the engine of some rank failed twice; everything generated so far
                is in the buffers, paused.
            RolloutError: if an engine returns something that cannot be used.
            NoSignalError: if too many groups teach nothing and the signal rule says stop; as after
                a failed engine, what was generated is in the buffers.

        Source:
            RollVerify Section 4.1; collective: yes, over the data ranks.
        """
        self._choice.begin()
        if self.is_on_policy:
            self._run_whole_batch(policy_version)
        else:
            self._run_until_enough(policy_version)
        chosen = self._choice.select()
        self._in_training = list(chosen[self._data_rank])
        mine = {g: self._buffer.pop_group(g, "trained") for g in self._in_training}
        for group_id in self._in_training:
            self._ledger.move(group_id, PromptState.FINISHED)
        self._choice.give_up()
        mine = exchange(mine, balance(chosen), self._data_rank, self._data_group)
        finished = [one for members in mine.values() for one in members]
        check_twins(self._data_rank, self._data_world_size, finished)
        balance_buffers(self._buffer, self._ledger, self._data_rank, self._data_group)
        return finished, self._buffer.trajectories()

    def mark_trained(self) -> None:
        """Tell the ledger that the optimizer step on the last F_k was taken."""
        for group_id in self._in_training:
            self._ledger.move(group_id, PromptState.TRAINED)
        self._in_training = []

    def set_on_policy(self, is_on_policy: bool) -> None:
        """Change the mode of the next phase.

        Turning on-policy drops everything unfinished; its prompts return to the head of the queue
        and start again from nothing, with sampling streams not used before.

        Args:
            is_on_policy: the new mode.

        Source:
            RollVerify Section 4.3; what happens to unfinished trajectories is our choice.
        """
        if is_on_policy:
            self._drop(lambda one: False, "the run goes on on-policy")
        self.is_on_policy = is_on_policy

    def drop_older(self, policy_version: int, *, verified: bool) -> None:
        """Drop groups that may not go on under this version: of an older policy, or not verified.

        For a run that is resumed with another method, or after a failed phase.

        Args:
            policy_version: version the engine will hold.
            verified: True keeps older tokens that were verified against this version.
        """
        rule = partial(is_current, policy_version=policy_version, verified=verified)
        why = "tokens of an older policy" + verified * " were not verified against this one"
        self._drop(rule, why)

    def drop_unrouted(self, *, recorded_later: int | None) -> None:
        """Drop groups with tokens whose experts were not recorded and will not be.

        For a run that is resumed with another mode of routing replay.

        Args:
            recorded_later: version whose tokens get their experts after the phase; None: none do.
        """
        rule = partial(is_routed, except_version=recorded_later)
        self._drop(rule, "the experts of some tokens were not recorded")

    def _drop(self, may_go_on: Callable[[TensorDict], bool], why: str) -> None:
        self.num_dropped += drop_groups(self._buffer, self._ledger, self._queue, may_go_on, why)

    def state_dict(self) -> dict[str, int]:
        """JSON counts of this rank; the mode follows from the method and the acceptance window."""
        return {"num_dropped": self.num_dropped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.num_dropped = int(state["num_dropped"])

    def _run_whole_batch(self, policy_version: int) -> None:
        """Draw this rank's share of a batch and run it, and what was left, to the end.

        As many groups as teach nothing are drawn anew and run, until the ranks hold a batch.
        """
        self.drop_older(policy_version, verified=False)
        while len(self._buffer.group_ids()) < self._prompts_per_step // self._data_world_size:
            self._draw_group()
        waiting = self._waiting(policy_version)
        self._loop.begin(policy_version, min(self._max_num_seqs, max(1, len(waiting))))
        failure = self._run_to_end(waiting)
        while not self._choice.count(has_failed=failure is not None):
            failure = self._run_to_end(self._refill())
        self._pause_all(failure)

    def _run_to_end(self, waiting: list[TensorDict]) -> EngineFailedError | None:
        try:
            for trajectory in waiting:
                self._start(trajectory)
            while self._loop.num_in_flight:
                self._loop.step()
        except EngineFailedError as error:
            return error
        return None

    def _refill(self) -> list[TensorDict]:
        """Draw what the batch lacks: over all ranks the groups that come next by their ids."""
        missing = self._choice.num_missing
        upcoming = self._queue.upcoming(missing)
        num_mine = share_of_lowest(upcoming, missing, self._data_rank, self._data_group)
        return [one for _ in range(num_mine) for one in self._draw_group()]

    def _run_until_enough(self, policy_version: int) -> None:
        """Keep the engine full until the ranks together hold a batch of complete groups."""
        waiting = deque(self._waiting(policy_version))
        self._loop.begin(policy_version, min(self._max_num_seqs, self._num_in_flight))
        failure = None
        while not self._choice.count(has_failed=failure is not None):
            try:
                for _ in range(self._count_every):
                    self._fill(waiting)
                    self._loop.step()
            except EngineFailedError as error:
                failure = error
        self._pause_all(failure)

    def _pause_all(self, failure: EngineFailedError | None) -> None:
        """Take back what runs; after a failure as far as the engine still answers.

        Raises on every rank if the engine of one has failed. Collective over the world.
        """
        try:
            self._loop.pause()
        except Exception:
            if failure is None:
                raise
        for group_id in self._buffer.group_ids():
            if self._ledger.state_of(group_id) is PromptState.RUNNING:
                self._ledger.move(group_id, PromptState.PAUSED)
        message = agree_on_failure(failure)
        if failure is not None:
            raise failure
        if message is not None:
            raise EngineFailedError(f"another rank: {message}")

    def _waiting(self, policy_version: int) -> list[TensorDict]:
        """Unfinished trajectories: those with tokens, then empty ones, by group and sample."""
        unfinished = [one for one in self._buffer.trajectories() if not is_finished(one)]
        if self._must_be_verified:
            # Finished responses that wait for their group are trained on later: they count too.
            check_verified(self._buffer.trajectories(), policy_version)
        begun = [one for one in unfinished if len(one["response_ids"])]
        return begun + [one for one in unfinished if not len(one["response_ids"])]

    def _fill(self, waiting: deque[TensorDict]) -> None:
        """Start requests until as many run as should; new groups when nothing waits."""
        while self._loop.num_in_flight < self._num_in_flight:
            if not waiting:
                waiting.extend(self._draw_group())
            self._start(waiting.popleft())

    def _start(self, trajectory: TensorDict) -> None:
        self._loop.start(trajectory)
        group_id = int(trajectory["group_id"])
        if self._ledger.state_of(group_id) is not PromptState.RUNNING:
            self._ledger.move(group_id, PromptState.RUNNING)

    def _draw_group(self) -> list[TensorDict]:
        return draw_group(self._queue, self._buffer, self._ledger, self._group_size)
