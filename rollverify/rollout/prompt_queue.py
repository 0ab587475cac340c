"""Which prompt a rank works on next: those that came back first, then its share of the stream.

Example: rank 1 of 2 draws groups 1, 3, 5 from batches 0, 1, 2. Groups 3 and 1 come back: the next
draws are 1, 3, 7.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollverify.errors import CheckpointError
from rollverify.ranks import Ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPrompt:
    """A prompt of the training set with what is needed to generate and grade its responses."""

    token_ids: tuple[int, ...]
    grade: Callable[[Sequence[int]], float]
    """Response ids -> reward."""

    prompt_index: int
    """Place in the training set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnPrompt:
    """A prompt for one group."""

    group_id: int
    """In drawing order, unique in a run and over ranks."""

    prompt: EncodedPrompt
    num_requests: int
    """Sampling streams that its samples have used; 0 unless it came back."""


@dataclass(kw_only=True)
class PromptQueue:
    """Prompts of one data rank, in the order of their group ids as far as possible."""

    batches: Iterator[list[EncodedPrompt]]
    """A prompt for each data rank, equal on all; number b is this rank's group b * size + rank."""

    prompts: Sequence[EncodedPrompt]
    """The training set by `prompt_index`."""

    ranks: Ranks

    num_streamed: int = field(default=0, init=False)
    """Draws of this rank from the stream."""

    _returned: list[tuple[int, int, int]] = field(
        default_factory=list[tuple[int, int, int]], init=False
    )
    """Heap of (group id, prompt index, sampling streams used)."""

    def returned_ids(self) -> list[int]:
        """Groups whose prompts came back and wait to be drawn again, ascending."""
        return sorted(group_id for group_id, _, _ in self._returned)

    def draw(self) -> DrawnPrompt:
        """The prompt that came back with the lowest group id, else the next of the stream."""
        if self._returned:
            group_id, prompt_index, num_requests = heapq.heappop(self._returned)
            return DrawnPrompt(
                group_id=group_id, prompt=self.prompts[prompt_index], num_requests=num_requests
            )
        group_id = self._streamed_id(self.num_streamed)
        self.num_streamed += 1
        prompt = next(self.batches)[self.ranks.rank]
        return DrawnPrompt(group_id=group_id, prompt=prompt, num_requests=0)

    def upcoming(self, count: int) -> list[int]:
        """Group ids of the next draws, in drawing order."""
        streamed = range(self.num_streamed, self.num_streamed + count)
        return [*self.returned_ids(), *map(self._streamed_id, streamed)][:count]

    def _streamed_id(self, number: int) -> int:
        return number * self.ranks.size + self.ranks.rank

    def put_back(self, group_id: int, prompt_index: int, num_requests: int) -> None:
        """Return the prompt of a dropped group; it is drawn before the stream goes on."""
        if any(group_id == waiting for waiting, _, _ in self._returned):
            raise ValueError(f"group {group_id} was put back twice")
        entry = (group_id, prompt_index, num_requests)
        if min(entry) < 0 or prompt_index >= len(self.prompts):
            raise ValueError(
                f"group {group_id} cannot be put back with prompt {prompt_index} of "
                f"{len(self.prompts)} and {num_requests} sampling streams used"
            )
        heapq.heappush(self._returned, entry)

    def state_dict(self) -> dict[str, Any]:
        """JSON values; "returned" lists [group id, prompt index, streams used] by id."""
        return {
            "returned": [list(entry) for entry in sorted(self._returned)],
            "num_streamed": self.num_streamed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, if it fits the training set."""
        before = self._returned
        self._returned = []
        try:
            for group_id, prompt_index, num_requests in state["returned"]:
                self.put_back(group_id, prompt_index, num_requests)
        except ValueError as error:
            self._returned = before
            raise CheckpointError(
                f"the saved prompt queue does not fit this run: {error}; resume with the same "
                "training set, or start a new run"
            ) from error
        self.num_streamed = state["num_streamed"]
