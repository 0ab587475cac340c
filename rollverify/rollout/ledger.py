"""The state of every prompt (group) that one data rank has drawn: always exactly one.

Example: add(4), move(4, RUNNING), move(4, FINISHED), move(4, TRAINED): counts are 0 but for
TRAINED 1, num_added 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rollverify.errors import CheckpointError, LedgerError


class PromptState(StrEnum):
    """Where a drawn prompt is."""

    PENDING = "pending"
    """Drawn, or returned to the queue."""

    RUNNING = "running"
    """Generated in this rollout phase."""

    PAUSED = "paused"
    """In U_k."""

    FINISHED = "finished"
    """In F_k."""

    TRAINED = "trained"
    FILTERED = "filtered"
    """Given up by a filter, for good."""


ALLOWED: Mapping[PromptState, frozenset[PromptState]] = {
    PromptState.PENDING: frozenset({PromptState.RUNNING}),
    PromptState.RUNNING: frozenset({PromptState.PAUSED, PromptState.FINISHED}),
    PromptState.PAUSED: frozenset(
        {PromptState.RUNNING, PromptState.FINISHED, PromptState.PENDING, PromptState.FILTERED}
    ),
    PromptState.FINISHED: frozenset({PromptState.TRAINED}),
    PromptState.TRAINED: frozenset(),
    PromptState.FILTERED: frozenset(),
}

TERMINAL = (PromptState.TRAINED, PromptState.FILTERED)
"""Nothing follows them; groups in them are only counted."""


@dataclass(kw_only=True)
class PromptLedger:
    """States of one data rank's groups; an unknown group or a second entry is a LedgerError."""

    num_added: int = field(default=0, init=False)
    num_moved_in: int = field(default=0, init=False)
    """Groups from other ranks less those that went there; over all ranks, 0."""

    _live: dict[int, PromptState] = field(default_factory=dict[int, PromptState], init=False)
    """By group id, where the state can still change."""
    _ended: dict[PromptState, int] = field(
        default_factory=lambda: dict.fromkeys(TERMINAL, 0), init=False
    )

    def __contains__(self, group_id: int) -> bool:
        """Whether the group was drawn here and is neither trained nor filtered."""
        return group_id in self._live

    def add(self, group_id: int) -> None:
        """Enter a newly drawn group as PENDING."""
        self._enter(group_id, PromptState.PENDING)
        self.num_added += 1

    def move(self, group_id: int, to: PromptState) -> None:
        """Change the state of a group, as `ALLOWED` says."""
        state = self.state_of(group_id)
        if to not in ALLOWED[state]:
            raise LedgerError(f"group {group_id} cannot go from {state} to {to}")
        if to in TERMINAL:
            del self._live[group_id]
            self._ended[to] += 1
        else:
            self._live[group_id] = to

    def release(self, group_id: int) -> PromptState:
        """Take out a group that goes to another rank; return its state, for `adopt` there."""
        state = self.state_of(group_id)
        del self._live[group_id]
        self.num_moved_in -= 1
        return state

    def adopt(self, group_id: int, state: PromptState) -> None:
        """Enter a group that comes from another rank, in the state that `release` gave there."""
        self._enter(group_id, state)
        self.num_moved_in += 1

    def state_of(self, group_id: int) -> PromptState:
        """State of a group that is neither trained nor filtered."""
        if group_id not in self._live:
            raise LedgerError(f"group {group_id} was never drawn here, has left, or has ended")
        return self._live[group_id]

    def groups_in(self, state: PromptState) -> list[int]:
        """Groups in a state that can still change, in no order."""
        return [group_id for group_id, found in self._live.items() if found is state]

    def counts(self) -> dict[PromptState, int]:
        """Groups in each state, those that ended included."""
        counts = dict.fromkeys(PromptState, 0) | self._ended
        for state in self._live.values():
            counts[state] += 1
        return counts

    def check(self) -> None:
        """Compare the groups in all states with those that came and went."""
        counts = self.counts()
        expected = self.num_added + self.num_moved_in
        if sum(counts.values()) != expected:
            listed = ", ".join(f"{state} {count}" for state, count in counts.items())
            raise LedgerError(
                f"the ledger holds {sum(counts.values())} groups ({listed}); {self.num_added} "
                f"drawn and {self.num_moved_in} moved in make {expected}"
            )

    def state_dict(self) -> dict[str, Any]:
        """JSON values: "live", [group id, state] by ascending id, and counts."""
        live = [[group_id, str(self._live[group_id])] for group_id in sorted(self._live)]
        ended = {str(state): count for state, count in self._ended.items()}
        return {"live": live, "num_added": self.num_added, **ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Groups beyond its `num_added` count as moved in: over all ranks `num_moved_in` is again 0.
        """
        try:
            live = {group_id: PromptState(name) for group_id, name in state["live"]}
        except ValueError as error:
            raise CheckpointError(
                f"the saved prompt ledger is damaged: {error}; resume from an older checkpoint"
            ) from error
        if len(live) != len(state["live"]) or any(s in TERMINAL for s in live.values()):
            raise CheckpointError(
                "the saved prompt ledger is damaged: a group is listed twice or has ended; resume "
                "from an older checkpoint"
            )
        self._live = live
        self._ended = {name: state[str(name)] for name in TERMINAL}
        self.num_added = state["num_added"]
        self.num_moved_in = len(live) + sum(self._ended.values()) - self.num_added

    def _enter(self, group_id: int, state: PromptState) -> None:
        if group_id in self._live:
            raise LedgerError(f"group {group_id} is {self._live[group_id]} and was entered again")
        self._live[group_id] = state
