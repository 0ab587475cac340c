"""Which complete groups fill F_k: with dynamic sampling only those that teach something.

Example, 4 groups a batch: 3 complete groups have a signal, 2 have none. The phase goes on until a
fourth has one; the 2 are given up, unscored, and F_k holds 4 groups with signal.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from rollverify.config.tables import DynamicSamplingConfig
from rollverify.errors import NoSignalError
from rollverify.ranks import Ranks
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.exchange import Work, select_groups, sizes_of
from rollverify.rollout.ledger import PromptLedger, PromptState
from rollverify.rollout.trajectory import stacked

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenUp:
    """Groups that were given up in one phase, this rank."""

    num_groups: int = 0
    num_trajectories: int = 0
    reward: float = 0.0
    """Sum."""


@dataclass(kw_only=True)
class GroupChoice:
    """The complete groups of one phase; without dynamic sampling every group has a signal."""

    dynamic_sampling: DynamicSamplingConfig
    has_signal: Callable[[Tensor], bool]
    """Of a whole group's rewards [n], float32."""

    num_groups: int
    """Of F_k, over all ranks."""

    buffer: TrajectoryBuffer
    ledger: PromptLedger
    ranks: Ranks
    settle: Callable[[], None]
    """Waits for rewards that are still missing."""

    work: Work
    is_stopping: bool = field(default=False, init=False)
    """Whether some rank of the world was asked to stop, at the last count."""

    num_running: int = field(default=0, init=False)
    """Requests in flight at the last count, over all ranks."""

    _judged: dict[int, bool] = field(default_factory=dict[int, bool], init=False)
    """Whether each complete group has a signal."""

    _num_taught: int = field(default=0, init=False)
    _num_silent: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.given_up = GivenUp() if self.dynamic_sampling.enable else None
        """Of the last phase; None where every group is trained on."""

    @property
    def num_missing(self) -> int:
        """Groups that F_k lacked at the last count, over all ranks."""
        return max(0, self.num_groups - self._num_taught)

    @property
    def max_given_up(self) -> int:
        """Groups without signal that one step may give up, over all ranks."""
        return math.floor(self.dynamic_sampling.max_dropped_batches * self.num_groups)

    def begin(self) -> None:
        """Forget the last phase: what it left may have been cut and sampled again."""
        self._judged = {}

    def count(self, *, has_failed: bool, has_stopped: bool = False, num_running: int = 0) -> bool:
        """Whether F_k is full or too few teach. Collective over the world.

        Not while requests run that must end first, `num_running` on this rank; but at once if an
        engine failed somewhere or some rank was asked to stop.
        """
        self._judge()
        taught = self.buffer.num_complete - len(self._silent())
        counts = [taught, len(self._silent()), int(has_failed), num_running]
        summed = self.ranks.sum_counts(counts)
        self._num_taught, self._num_silent, num_failed, self.num_running = summed
        # Twins end a phase at the same step: one may have got the signal a step before another.
        self.is_stopping = bool(Ranks.world().largest(int(has_stopped)))
        if num_failed > 0 or self.is_stopping:
            return True
        return not self.num_running and (self.num_missing == 0 or self._is_at_cap())

    def select(self) -> list[dict[int, int]]:
        """Choose F_k, lowest ids first: work by group id, per data rank. Collective.

        A NoSignalError on every rank, if too many groups have no signal and the run is to stop.
        """
        if self.dynamic_sampling.enable:
            self.count(has_failed=False)  # The pause may have finished some more.
            if self.num_missing:
                self._at_cap()
        silent = self._silent()
        complete = self.buffer.complete_groups()
        taught = {g: self.buffer.group(g) for g in complete if g not in silent}
        spare = {g: self.buffer.group(g) for g in silent}
        sizes, more = sizes_of(taught, self.work), sizes_of(spare, self.work)
        return select_groups(sizes, self.num_groups, self.ranks, spare=more)

    def give_up(self) -> None:
        """Give up what has no signal and is not in F_k, which the caller has taken out."""
        if not self.dynamic_sampling.enable:
            return
        left = sorted(self._silent() & set(self.buffer.group_ids()))
        rewards = [stacked(self.buffer.pop_group(g, "filtered"), "reward") for g in left]
        for group_id in left:
            self.ledger.move(group_id, PromptState.FILTERED)
        self.given_up = GivenUp(
            num_groups=len(rewards),
            num_trajectories=sum(map(len, rewards)),
            reward=math.fsum(group.sum().item() for group in rewards),
        )

    def _judge(self) -> None:
        """Look at the groups that were completed since the last time."""
        if not self.dynamic_sampling.enable or len(self._judged) == self.buffer.num_complete:
            return
        self.settle()
        for group_id in self.buffer.complete_groups():
            if group_id not in self._judged:
                rewards = stacked(self.buffer.group(group_id), "reward")
                self._judged[group_id] = self.has_signal(rewards)

    def _silent(self) -> set[int]:
        return {group_id for group_id, has_signal in self._judged.items() if not has_signal}

    def _is_at_cap(self) -> bool:
        if not self.dynamic_sampling.enable or self._num_silent <= self.max_given_up:
            return False
        is_filled = self._num_taught + self._num_silent >= self.num_groups
        return self.dynamic_sampling.at_cap == "stop" or is_filled

    def _at_cap(self) -> None:
        """Say that F_k cannot be filled with groups that have a signal, or stop."""
        found = f"{self._num_taught} of the {self.num_groups} groups of a batch have a signal"
        if self.dynamic_sampling.at_cap == "train":
            logger.warning("%s; it is filled up with groups that have none", found)
            return
        rewards = [stacked(self.buffer.group(g), "reward") for g in sorted(self._silent())]
        own = (math.fsum(group.sum().item() for group in rewards), sum(map(len, rewards)))
        sums, counts = zip(*self.ranks.gather(own), strict=True)
        raise NoSignalError(
            f"dynamic sampling found {self._num_silent} groups without signal in one step, more "
            f"than the {self.max_given_up} of dynamic_sampling.max_dropped_batches; {found}, and "
            f"the mean reward of the others is {math.fsum(sums) / max(1, sum(counts)):.3g}: the "
            "prompts are too easy or too hard for this policy; change them, raise "
            "rollout.group_size or the limit, or set dynamic_sampling.at_cap = 'train'"
        )
