"""The groups one data rank has drawn and not yet trained on, and what became of their tokens.

Example, group_size 2: group 7 is added empty; after `append` of 3 and 2 tokens and `set_outcome` of
both, num_tokens is 5, num_complete 1. Cutting one token leaves 4 and 0; generated 5, cut 1.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Unpack

from tensordict import TensorDict

from rollverify.errors import LedgerError, RolloutError
from rollverify.rollout import trajectory as segments
from rollverify.rollout.trajectory import (
    Request,
    Status,
    is_finished,
    name_of,
    validate_trajectory,
)


@dataclass(kw_only=True, slots=True)
class TokenCounts:
    """What became of the response tokens of this rank since the start of the run."""

    generated: int = 0
    trained: int = 0
    cut: int = 0
    """By verification."""

    discarded: int = 0
    """By a filter; their sample starts again."""

    filtered: int = 0
    """With their group, for good."""

    dropped: int = 0
    """At the switch to on-policy training."""

    @property
    def num_left(self) -> int:
        """Generated tokens that nothing has happened to yet."""
        thrown_away = self.cut + self.discarded + self.filtered + self.dropped
        return self.generated - self.trained - thrown_away


Fate = Literal["trained", "filtered", "dropped", "moved"]


@dataclass(kw_only=True)
class TrajectoryBuffer:
    """Whole groups of trajectories; they are changed through it only, so its counts stay right."""

    group_size: int
    counts: TokenCounts = field(default_factory=TokenCounts, init=False)
    """Part of a checkpoint."""

    num_complete: int = field(default=0, init=False)
    num_tokens: int = field(default=0, init=False)
    """Response tokens held."""

    num_moved_in: int = field(default=0, init=False)
    """Tokens from other ranks less those that went there; over all ranks, 0."""

    _groups: dict[int, list[TensorDict]] = field(
        default_factory=dict[int, list[TensorDict]], init=False
    )
    _group_of: dict[int, int] = field(default_factory=dict[int, int], init=False)
    """By identity of a TensorDict, which is kept alive."""
    _num_finished: dict[int, int] = field(default_factory=dict[int, int], init=False)
    """By group id: whether a group is complete is asked at every step."""

    def add_group(self, trajectories: Sequence[TensorDict]) -> None:
        """Take in a new group, samples 0, 1, ... in order; its tokens were generated elsewhere."""
        group = list(trajectories)
        for trajectory in group:
            validate_trajectory(trajectory)
        places = [(int(t["group_id"]), int(t["sample_index"])) for t in group]
        group_id = places[0][0] if places else -1
        if places != [(group_id, index) for index in range(self.group_size)]:
            raise ValueError(
                f"a group needs samples 0 to {self.group_size - 1} of one group id in order, got "
                f"(group, sample) {places}"
            )
        if group_id in self._groups:
            raise ValueError(f"the buffer already holds group {group_id}")
        self._groups[group_id] = group
        self._group_of |= {id(trajectory): group_id for trajectory in group}
        self._num_finished[group_id] = sum(map(is_finished, group))
        self.num_complete += self._is_complete(group_id)
        num_tokens = sum(map(_num_response_tokens, group))
        self.num_tokens += num_tokens
        self.num_moved_in += num_tokens

    def trajectories(self) -> list[TensorDict]:
        """All of them by group id, then sample; the TensorDicts themselves, not copies."""
        return [t for group_id in self.group_ids() for t in self._groups[group_id]]

    def group_ids(self) -> list[int]:
        """Groups held, ascending."""
        return sorted(self._groups)

    def group(self, group_id: int) -> list[TensorDict]:
        """Trajectories of a group by sample."""
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
        **request: Unpack[Request],
    ) -> None:
        """Append what one request generated, see `append_segment`."""
        with self._changing(trajectory):
            if is_finished(trajectory):
                raise RolloutError(f"{name_of(trajectory)} is finished and was generated further")
            segments.append_segment(trajectory, token_ids, behavior_logprobs, **request)
        self.counts.generated += len(token_ids)

    def set_outcome(self, trajectory: TensorDict, status: Status, reward: float) -> None:
        """Store how the response ended, or that it has not."""
        with self._changing(trajectory):
            segments.set_outcome(trajectory, status, reward)

    def truncate(self, trajectory: TensorDict, num_kept: int) -> int:
        """Keep the first tokens of the response; return how many were cut."""
        num_cut = self._truncate(trajectory, num_kept)
        self.counts.cut += num_cut
        return num_cut

    def discard(self, trajectory: TensorDict) -> int:
        """Start a sample again from its prompt, with a new stream; return how many tokens went."""
        num_discarded = self._truncate(trajectory, 0)
        self.counts.discarded += num_discarded
        return num_discarded

    def pop_group(self, group_id: int, fate: Fate) -> list[TensorDict]:
        """Take a group out; its tokens are counted by their fate, "moved" goes to another rank."""
        group = self.group(group_id)
        is_complete = self._is_complete(group_id)
        if fate == "trained" and not is_complete:
            raise ValueError(f"group {group_id} is not complete and cannot be trained on")
        num_tokens = sum(map(_num_response_tokens, group))
        if fate == "moved":
            self.num_moved_in -= num_tokens
        else:
            setattr(self.counts, fate, getattr(self.counts, fate) + num_tokens)
        self.num_tokens -= num_tokens
        self.num_complete -= is_complete
        del self._groups[group_id], self._num_finished[group_id]
        for trajectory in group:
            del self._group_of[id(trajectory)]
        return group

    def check(self) -> None:
        """Count again: generated + moved in == trained + thrown away + held, else a LedgerError."""
        held = sum(map(_num_response_tokens, self.trajectories()))
        complete = sum(all(map(is_finished, group)) for group in self._groups.values())
        expected = self.counts.num_left + self.num_moved_in
        if held != expected or held != self.num_tokens:
            raise LedgerError(
                f"the buffer holds {held} tokens and counted {self.num_tokens}; {self.counts} and "
                f"{self.num_moved_in} moved in leave {expected}"
            )
        if complete != self.num_complete:
            raise LedgerError(f"{complete} groups are complete, {self.num_complete} were counted")

    def state_dict(self) -> dict[str, int]:
        """The counts; the trajectories are saved apart."""
        return asdict(self.counts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back the counts; the groups saved with them are added before or after."""
        counts = TokenCounts(**state)
        # What is added at a restart comes from the run itself, not from another rank.
        self.num_moved_in += self.counts.num_left - counts.num_left
        self.counts = counts

    def _is_complete(self, group_id: int) -> bool:
        return self._num_finished[group_id] == self.group_size

    @contextmanager
    def _changing(self, trajectory: TensorDict) -> Generator[None]:
        """Count what a change of a trajectory does to tokens and complete groups."""
        group_id = self._group_of.get(id(trajectory))
        if group_id is None:
            raise ValueError(f"the buffer does not hold {name_of(trajectory)}, or only a copy")
        num_tokens, was_finished = _num_response_tokens(trajectory), is_finished(trajectory)
        yield
        self.num_tokens += _num_response_tokens(trajectory) - num_tokens
        self.num_complete -= self._is_complete(group_id)
        self._num_finished[group_id] += is_finished(trajectory) - was_finished
        self.num_complete += self._is_complete(group_id)

    def _truncate(self, trajectory: TensorDict, num_kept: int) -> int:
        before = self.num_tokens
        with self._changing(trajectory):
            segments.truncate(trajectory, num_kept)
        return before - self.num_tokens


def _num_response_tokens(trajectory: TensorDict) -> int:
    return len(trajectory["response_ids"])
