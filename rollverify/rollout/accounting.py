"""Follows every prompt and every sampled token of the run, and stops it when one goes missing."""

from dataclasses import asdict, dataclass, field

from rollverify.errors import LedgerError
from rollverify.hooks import StepState
from rollverify.rollout.ledger import PromptState
from rollverify.rollout.rollouter import Rollouter


@dataclass(kw_only=True)
class Accounting:
    """Two hooks: `after_train` books F_k as trained, the call itself checks and logs all counts."""

    rollouter: Rollouter
    _num_lost_before: int = field(default=0, init=False)

    def after_train(self, state: StepState) -> None:
        """Book F_k as trained, before anything of U_k is cut."""
        del state
        self.rollouter.mark_trained()
        self._num_lost_before = self._num_lost

    @property
    def _num_lost(self) -> int:
        """Tokens of this rank so far that have to be sampled again."""
        counts = self.rollouter.buffer.counts
        return counts.cut + counts.discarded + counts.dropped

    def __call__(self, state: StepState) -> None:
        """Check the books of this rank, then of all; fill `ledger/` and `tokens/`. Collective."""
        buffer, ledger, ranks = self.rollouter.buffer, self.rollouter.ledger, self.rollouter.ranks
        buffer.check()
        ledger.check()
        self._check_places(state.step)
        sums = {f"ledger/{name}": float(num) for name, num in ledger.counts().items()}
        counts = asdict(buffer.counts) | {"held": buffer.num_tokens}
        sums |= {f"tokens/{fate}": float(num) for fate, num in counts.items()}
        sums["ledger/num_dropped"] = float(self.rollouter.num_dropped)
        sums["rollout/tokens_to_regenerate"] = float(self._num_lost - self._num_lost_before)
        sums["progress/num_prompts"] = float(ledger.num_added)
        moved = {"groups": float(ledger.num_moved_in), "tokens": float(buffer.num_moved_in)}
        sums, moved = ranks.sum(sums), ranks.sum(moved)
        lost = {name: num for name, num in moved.items() if num}
        if lost:
            raise LedgerError(f"step {state.step}: moves between ranks do not add up to 0: {lost}")
        state.metrics |= sums

    def _check_places(self, step: int) -> None:
        """The ledger, the buffer and the queue must name the same groups."""
        ledger, queue = self.rollouter.ledger, self.rollouter.queue
        paused = set(ledger.groups_in(PromptState.PAUSED))
        pending = set(ledger.groups_in(PromptState.PENDING))
        # A prompt that no rank had drawn when the ranks changed waits in the queue unentered.
        queued = {group_id for group_id in queue.returned_ids() if group_id in ledger}
        wrong = (paused ^ set(self.rollouter.buffer.group_ids())) | (pending ^ queued)
        for moving in (PromptState.RUNNING, PromptState.FINISHED):
            wrong |= set(ledger.groups_in(moving))
        if wrong:
            raise LedgerError(
                f"step {step}: ledger, buffer and queue do not agree on group {min(wrong)}"
            )
