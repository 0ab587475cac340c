"""Follows every prompt and every sampled token of the run, and stops it when one goes missing.

Changes no trajectory. Which group goes where is decided by the rollouter and the hooks before.
"""

import dataclasses
from typing import Protocol

import torch.distributed as dist

from rollverify.errors import LedgerError
from rollverify.hooks import StepState
from rollverify.ranks import reduce_metrics
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.ledger import PromptLedger, PromptState
from rollverify.rollout.prompt_queue import PromptQueue


class Rollouter(Protocol):
    """What is told to the rollouter and read of it."""

    num_dropped: int

    def mark_trained(self) -> None:
        """The optimizer step on the last F_k was taken."""
        ...


class Accounting:
    """Two hooks: `after_train` books F_k as trained, the call itself checks and logs all counts."""

    def __init__(
        self,
        *,
        rollouter: Rollouter,
        buffer: TrajectoryBuffer,
        ledger: PromptLedger,
        queue: PromptQueue,
        data_group: dist.ProcessGroup | None,
    ) -> None:
        """Set up.

        Args:
            rollouter: has handed out F_k.
            buffer: groups drawn and not yet trained on.
            ledger: where each prompt is.
            queue: prompts that came back.
            data_group: ranks that hold different trajectories; None where there is one.
        """
        self._rollouter = rollouter
        self._buffer = buffer
        self._ledger = ledger
        self._queue = queue
        self._data_group = data_group
        self._num_lost_before = 0

    def after_train(self, state: StepState) -> None:
        """Book F_k as trained, before anything of U_k is cut."""
        del state
        self._rollouter.mark_trained()
        self._num_lost_before = self._num_lost

    @property
    def _num_lost(self) -> int:
        """Tokens of this rank so far that have to be sampled again."""
        counts = self._buffer.counts
        return counts.cut + counts.discarded + counts.dropped

    def __call__(self, state: StepState) -> None:
        """Check this rank's books, then those of all ranks together; fill `ledger/` and `tokens/`.

        Collective: yes, over the data ranks.

        Raises:
            LedgerError: if a prompt or a token was lost or counted twice.
        """
        self._buffer.check()
        self._ledger.check()
        self._check_places(state.step)
        sums = {f"ledger/{name}": float(num) for name, num in self._ledger.counts().items()}
        counts = dataclasses.asdict(self._buffer.counts) | {"held": self._buffer.num_tokens}
        sums |= {f"tokens/{fate}": float(num) for fate, num in counts.items()}
        sums["ledger/num_dropped"] = float(self._rollouter.num_dropped)
        sums["rollout/tokens_to_regenerate"] = float(self._num_lost - self._num_lost_before)
        sums["progress/num_prompts"] = float(self._ledger.num_added)
        moved = {
            "groups": float(self._ledger.num_moved_in),
            "tokens": float(self._buffer.num_moved_in),
        }
        if self._data_group is not None:
            sums, _ = reduce_metrics(sums, {}, self._data_group)
            moved, _ = reduce_metrics(moved, {}, self._data_group)
        lost = {name: num for name, num in moved.items() if num}
        if lost:
            raise LedgerError(f"step {state.step}: moves between ranks do not add up to 0: {lost}")
        state.metrics |= sums

    def _check_places(self, step: int) -> None:
        """The ledger, the buffer and the queue must name the same groups."""
        paused = set(self._ledger.groups_in(PromptState.PAUSED))
        pending = set(self._ledger.groups_in(PromptState.PENDING))
        # A prompt that no rank had drawn when the ranks changed waits in the queue unentered.
        queued = {group_id for group_id in self._queue.returned_ids() if group_id in self._ledger}
        wrong = (paused ^ set(self._buffer.group_ids())) | (pending ^ queued)
        for moving in (PromptState.RUNNING, PromptState.FINISHED):
            wrong |= set(self._ledger.groups_in(moving))
        if wrong:
            raise LedgerError(
                f"step {step}: ledger, buffer and queue do not agree on group {min(wrong)}"
            )
