"""The groups one data rank has drawn and not yet trained on, and what became of their tokens.

Does not decide what to generate, cut or train on. Trajectories it holds are changed through it
only, so that its counts stay right.

Example, group_size 2: group 7 is added empty; after `append` of 3 and 2 tokens and `set_outcome` of
both, num_tokens is 5, num_complete 1. Cutting one token leaves 4 and 0; generated 5, cut 1.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tensordict import TensorDict

from rollverify.errors import LedgerError, RolloutError
from rollverify.rollout import trajectory as segments
from rollverify.rollout.trajectory import Status, is_finished, name_of, validate_trajectory


@dataclass(kw_only=True, slots=True)
class TokenCounts:
    """What became of the response tokens of this rank since the start of the run."""

    generated: int = 0
    """Sampled by the engine."""

    trained: int = 0
    """Handed to training."""

    cut: int = 0
    """Cut by verification."""

    discarded: int = 0
    """Thrown away by a filter; their sample starts again."""

    filtered: int = 0
    """Given up for good with their group."""

    dropped: int = 0
    """Given up at the switch to on-policy training."""

    @property
    def num_left(self) -> int:
        """Generated tokens that nothing has happened to yet."""
        thrown_away = self.cut + self.discarded + self.filtered + self.dropped
        return self.generated - self.trained - thrown_away


Fate = Literal["trained", "filtered", "dropped", "moved"]


class TrajectoryBuffer:
    """Whole groups of trajectories.

    A trajectory or group that the buffer does not hold is a ValueError in every method.
    """

    def __init__(self, *, group_size: int) -> None:
        """Start empty.

        Args:
            group_size: trajectories of a group, >= 1.
        """
        self._group_size = group_size
        self._groups: dict[int, list[TensorDict]] = {}
        self._group_of: dict[int, int] = {}  # by identity of a TensorDict, which is kept alive
        self._num_finished: dict[int, int] = {}  # trajectories by group id
        self._num_complete = 0
        self._num_tokens = 0
        self._num_moved_in = 0
        self.counts = TokenCounts()
        """Over the run, this rank; part of a checkpoint."""

    @property
    def num_complete(self) -> int:
        """Groups whose trajectories are all finished; known without looking at them."""
        return self._num_complete

    @property
    def num_tokens(self) -> int:
        """Response tokens held; known without looking at the trajectories."""
        return self._num_tokens

    @property
    def num_moved_in(self) -> int:
        """Tokens that came from other ranks less those that went there; over all ranks, 0."""
        return self._num_moved_in

    def add_group(self, trajectories: Sequence[TensorDict]) -> None:
        """Take in a new group; its tokens, if any, were generated elsewhere.

        Args:
            trajectories: `group_size` of them, samples 0, 1, ... of one group in order.

        Raises:
            ValueError: if they are not that, one is invalid, or the buffer holds the group.
        """
        group = list(trajectories)
        for one in group:
            validate_trajectory(one)
        places = [(int(one["group_id"]), int(one["sample_index"])) for one in group]
        group_id = places[0][0] if places else -1
        if places != [(group_id, index) for index in range(self._group_size)]:
            raise ValueError(
                f"a group needs samples 0 to {self._group_size - 1} of one group id in order, got "
                f"(group, sample) {places}"
            )
        if group_id in self._groups:
            raise ValueError(f"the buffer already holds group {group_id}")
        self._groups[group_id] = group
        self._group_of |= {id(one): group_id for one in group}
        self._num_finished[group_id] = sum(map(is_finished, group))
        self._num_complete += self._is_complete(group_id)
        num_tokens = sum(map(_num_response_tokens, group))
        self._num_tokens += num_tokens
        self._num_moved_in += num_tokens

    def trajectories(self) -> list[TensorDict]:
        """All of them by group id, then sample; the TensorDicts themselves, not copies."""
        return [one for group_id in self.group_ids() for one in self._groups[group_id]]

    def group_ids(self) -> list[int]:
        """Groups held, ascending."""
        return sorted(self._groups)

    def group(self, group_id: int) -> list[TensorDict]:
        """Trajectories of a group by sample.

        Raises:
            ValueError: if the buffer does not hold the group.
        """
        if group_id not in self._groups:
            raise ValueError(f"the buffer does not hold group {group_id}")
        return list(self._groups[group_id])

    def complete_groups(self) -> list[int]:
        """Groups whose trajectories are all finished, ascending."""
        return [group_id for group_id in self.group_ids() if self._is_complete(group_id)]

    def append(
        self,
        trajectory: TensorDict,
        token_ids: Sequence[int],
        behavior_logprobs: Sequence[float],
        *,
        policy_version: int,
        seed: int,
        mask_older: bool = False,
    ) -> None:
        """Append what one request generated, see `segments.append_segment`.

        Args:
            trajectory: changed in place.
            token_ids: new ids only; may be empty.
            behavior_logprobs: nats, one per new id.
            policy_version: version that the engine held when the request was sent.
            seed: of the request's sampling stream.
            mask_older: True takes the tokens of older versions out of the loss.

        Raises:
            RolloutError: if the trajectory is finished, or see `append_segment`.
        """
        self._group_id(trajectory)
        if is_finished(trajectory):
            raise RolloutError(f"{name_of(trajectory)} is finished and was generated further")
        segments.append_segment(
            trajectory,
            token_ids,
            behavior_logprobs,
            policy_version=policy_version,
            seed=seed,
            mask_older=mask_older,
        )
        self._num_tokens += len(token_ids)
        self.counts.generated += len(token_ids)

    def set_outcome(self, trajectory: TensorDict, status: Status, reward: float) -> None:
        """Store how the response ended, or that it has not.

        Args:
            trajectory: changed in place.
            status: its status.
            reward: of the whole response; 0 while unfinished.

        Raises:
            ValueError: if an unfinished response is given a reward.
        """
        group_id, was_finished = self._group_id(trajectory), is_finished(trajectory)
        segments.set_outcome(trajectory, status, reward)
        self._count_finished(group_id, is_finished(trajectory) - was_finished)

    def truncate(self, trajectory: TensorDict, num_kept: int) -> int:
        """Keep the first tokens of the response; see `segments.truncate`.

        Args:
            trajectory: changed in place.
            num_kept: response tokens to keep, 0..R.

        Returns:
            Tokens cut.

        Raises:
            ValueError: if `num_kept` is out of range.
        """
        num_cut = self._truncate(trajectory, num_kept)
        self.counts.cut += num_cut
        return num_cut

    def discard(self, trajectory: TensorDict) -> int:
        """Start a sample again from its bare prompt, in the same group, with a new stream.

        Returns:
            Tokens thrown away.
        """
        num_discarded = self._truncate(trajectory, 0)
        self.counts.discarded += num_discarded
        return num_discarded

    def pop_group(self, group_id: int, fate: Fate) -> list[TensorDict]:
        """Take a group out.

        Args:
            group_id: the group.
            fate: what its tokens are counted as; "moved" goes to another rank.

        Returns:
            Its trajectories by sample.

        Raises:
            ValueError: if an incomplete group is to be trained on.
        """
        group = self.group(group_id)
        if fate == "trained" and not self._is_complete(group_id):
            raise ValueError(f"group {group_id} is not complete and cannot be trained on")
        num_tokens = sum(map(_num_response_tokens, group))
        if fate == "moved":
            self._num_moved_in -= num_tokens
        else:
            setattr(self.counts, fate, getattr(self.counts, fate) + num_tokens)
        self._num_tokens -= num_tokens
        self._num_complete -= self._is_complete(group_id)
        del self._groups[group_id], self._num_finished[group_id]
        for one in group:
            del self._group_of[id(one)]
        return group

    def check(self) -> None:
        """Count everything again.

        Raises:
            LedgerError: if a token was lost or counted twice, or a trajectory was changed by
                someone else: generated + moved in == trained + thrown away + held.
        """
        held = sum(map(_num_response_tokens, self.trajectories()))
        complete = sum(all(map(is_finished, group)) for group in self._groups.values())
        expected = self.counts.num_left + self._num_moved_in
        if held != expected or held != self._num_tokens:
            raise LedgerError(
                f"the buffer holds {held} tokens and counted {self._num_tokens}; {self.counts} and "
                f"{self._num_moved_in} moved in leave {expected}"
            )
        if complete != self._num_complete:
            raise LedgerError(f"{complete} groups are complete, {self._num_complete} were counted")

    def state_dict(self) -> dict[str, int]:
        """The counts; the trajectories are saved apart."""
        return asdict(self.counts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back the counts; the groups saved with them are added before or after."""
        counts = TokenCounts(**state)
        # What is added at a restart comes from the run itself, not from another rank.
        self._num_moved_in += self.counts.num_left - counts.num_left
        self.counts = counts

    def _group_id(self, trajectory: TensorDict) -> int:
        group_id = self._group_of.get(id(trajectory))
        if group_id is None:
            raise ValueError(f"the buffer does not hold {name_of(trajectory)}, or only a copy")
        return group_id

    def _is_complete(self, group_id: int) -> bool:
        return self._num_finished[group_id] == self._group_size

    def _count_finished(self, group_id: int, change: int) -> None:
        self._num_complete -= self._is_complete(group_id)
        self._num_finished[group_id] += change
        self._num_complete += self._is_complete(group_id)

    def _truncate(self, trajectory: TensorDict, num_kept: int) -> int:
        group_id, was_finished = self._group_id(trajectory), is_finished(trajectory)
        num_cut = _num_response_tokens(trajectory) - num_kept
        segments.truncate(trajectory, num_kept)
        self._count_finished(group_id, is_finished(trajectory) - was_finished)
        self._num_tokens -= num_cut
        return num_cut


def _num_response_tokens(trajectory: TensorDict) -> int:
    return len(trajectory["response_ids"])
