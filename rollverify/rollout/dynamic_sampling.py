"""Which complete groups fill F_k: with a signal rule only those that teach something.

A group without signal is given up for good as soon as the phase ends, before anything scores it;
until then it only counts. Does not run requests and does not draw the groups that take its place,
the rollouter does; what a signal is comes in as a function of rewards.

Example, 4 groups a batch: 3 complete groups have a signal, 2 have none. The phase goes on until a
fourth has one; the 2 are given up, and F_k holds 4 groups with signal.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from torch import Tensor

from rollverify.errors import NoSignalError
from rollverify.ranks import gather, sum_over_ranks
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.exchange import select_groups, tokens_of
from rollverify.rollout.ledger import PromptLedger, PromptState
from rollverify.rollout.trajectory import stacked

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalRule:
    """What a group must have to be trained on, and how long to look for it."""

    has_signal: Callable[[Tensor], bool]
    """[n] float32 rewards of a whole group -> whether it is trained on."""

    max_given_up: int
    """Groups without signal that one step may give up, over all ranks, >= 0."""

    at_cap: Literal["stop", "train"]
    """With more of them and the batch not full: end the run, or fill it up with some of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenUp:
    """Groups that were given up in one phase, this rank."""

    num_groups: int = 0
    num_trajectories: int = 0
    reward: float = 0.0
    """Sum of their rewards."""


class GroupChoice:
    """The complete groups of one phase, with and without signal.

    Without a rule every group has one.
    """

    def __init__(
        self,
        *,
        rule: SignalRule | None,
        num_groups: int,
        buffer: TrajectoryBuffer,
        ledger: PromptLedger,
        data_group: dist.ProcessGroup | None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """Set up.

        Args:
            rule: None trains on every group.
            num_groups: groups of F_k, over all ranks.
            buffer: holds the groups.
            ledger: learns of groups that are given up.
            data_group: ranks that hold different groups; None where there is one.
            settle: called before rewards are looked at; waits for those that are still missing.
        """
        self._settle = settle
        self._rule = rule
        self._num_groups = num_groups
        self._buffer = buffer
        self._ledger = ledger
        self._data_group = data_group
        self._has_signal: dict[int, bool] = {}
        self._num_taught = 0
        self._num_silent = 0
        self.given_up: GivenUp | None = None if rule is None else GivenUp()
        """Of the last phase; None without a rule."""

    @property
    def num_missing(self) -> int:
        """Groups that F_k lacked at the last count, over all ranks."""
        return max(0, self._num_groups - self._num_taught)

    def begin(self) -> None:
        """Forget the last phase: what it left may have been cut and sampled again."""
        self._has_signal = {}

    def count(self, *, has_failed: bool) -> bool:
        """Count the complete groups of all ranks.

        Args:
            has_failed: whether this rank's engine has.

        Returns:
            Whether the phase ends; the same answer on every rank: F_k is full, too many groups have
            no signal, or an engine has failed. Collective: yes, over the data ranks.
        """
        self._judge()
        taught = self._buffer.num_complete - len(self._silent())
        counts = [taught, len(self._silent()), int(has_failed)]
        self._num_taught, self._num_silent, num_failed = sum_over_ranks(counts, self._data_group)
        return num_failed > 0 or self.num_missing == 0 or self._is_at_cap()

    def select(self) -> list[dict[int, int]]:
        """Choose F_k: the groups with a signal with the lowest ids.

        Returns:
            Per data rank, tokens of its chosen groups by group id; equal on every rank. Collective:
            yes, over the data ranks.

        Raises:
            NoSignalError: on every rank, if too many groups have no signal and the rule says stop.
        """
        if self._rule is not None:
            self.count(has_failed=False)  # The pause may have finished some more.
            if self.num_missing:
                self._at_cap(self._rule)
        silent = self._silent()
        complete = self._buffer.complete_groups()
        taught = {g: self._buffer.group(g) for g in complete if g not in silent}
        spare = {g: self._buffer.group(g) for g in silent}
        return select_groups(
            tokens_of(taught), self._num_groups, self._data_group, spare=tokens_of(spare)
        )

    def give_up(self) -> None:
        """Give up what has no signal and is not in F_k, which the caller has taken out."""
        if self._rule is None:
            return
        held = set(self._buffer.group_ids())
        rewards = [
            stacked(self._buffer.pop_group(group_id, "filtered"), "reward")
            for group_id in sorted(self._silent() & held)
        ]
        for group_id in self._silent() & held:
            self._ledger.move(group_id, PromptState.FILTERED)
        self.given_up = GivenUp(
            num_groups=len(rewards),
            num_trajectories=sum(map(len, rewards)),
            reward=math.fsum(one.sum().item() for one in rewards),
        )

    def _judge(self) -> None:
        """Look at the groups that were completed since the last time."""
        if self._rule is None or len(self._has_signal) == self._buffer.num_complete:
            return
        self._settle()
        for group_id in self._buffer.complete_groups():
            if group_id not in self._has_signal:
                rewards = stacked(self._buffer.group(group_id), "reward")
                self._has_signal[group_id] = self._rule.has_signal(rewards)

    def _silent(self) -> set[int]:
        return {group_id for group_id, has_signal in self._has_signal.items() if not has_signal}

    def _is_at_cap(self) -> bool:
        rule = self._rule
        if rule is None or self._num_silent <= rule.max_given_up:
            return False
        return rule.at_cap == "stop" or self._num_taught + self._num_silent >= self._num_groups

    def _at_cap(self, rule: SignalRule) -> None:
        """Say that F_k cannot be filled with groups that have a signal, or stop."""
        found = f"{self._num_taught} of the {self._num_groups} groups of a batch have a signal"
        if rule.at_cap == "train":
            logger.warning("%s; it is filled up with groups that have none", found)
            return
        rewards = [stacked(self._buffer.group(g), "reward") for g in sorted(self._silent())]
        own = (math.fsum(one.sum().item() for one in rewards), sum(map(len, rewards)))
        sums, counts = zip(*gather(own, self._data_group), strict=True)
        raise NoSignalError(
            f"dynamic sampling found {self._num_silent} groups without signal in one step, more "
            f"than the {rule.max_given_up} of dynamic_sampling.max_dropped_batches; {found}, and "
            f"the mean reward of the others is {math.fsum(sums) / max(1, sum(counts)):.3g}: the "
            "prompts are too easy or too hard for this policy; change them, raise "
            "rollout.group_size or the limit, or set dynamic_sampling.at_cap = 'train'"
        )
