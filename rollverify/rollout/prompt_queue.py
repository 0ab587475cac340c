"""Which prompt a rank works on next: those that came back first, then its share of the stream.

Does not decide how many prompts are drawn, nor who keeps the position of the stream (the loader).

Example: rank 1 of 2 draws groups 1, 3, 5 from batches 0, 1, 2. Groups 3 and 1 come back: the next
draws are 1, 3, 7.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rollverify.errors import CheckpointError, RolloutError


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPrompt:
    """A prompt of the training set with what is needed to generate and grade its responses."""

    token_ids: tuple[int, ...]
    """Prompt ids."""

    grade: Callable[[Sequence[int]], float]
    """Response ids -> reward."""

    prompt_index: int
    """Place in the training set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnPrompt:
    """A prompt for one group."""

    group_id: int
    """Number of the group in drawing order, unique in a run and over ranks."""

    prompt: EncodedPrompt
    """What the group's responses answer."""

    num_requests: int
    """Sampling streams that its samples have used already; 0 unless it came back."""


class PromptQueue:
    """Prompts of one data rank, in the order of their group ids as far as possible."""

    def __init__(
        self,
        *,
        batches: Iterator[list[EncodedPrompt]],
        prompts: Sequence[EncodedPrompt],
        data_rank: int,
        data_world_size: int,
    ) -> None:
        """Set up; nothing is drawn yet.

        Args:
            batches: lists of `data_world_size` prompts, the same on every data rank; number b
                gives this rank the group b * data_world_size + data_rank.
            prompts: the training set by `prompt_index`, for prompts that come back.
            data_rank: this rank's place among the data ranks.
            data_world_size: number of data ranks.
        """
        self._batches = batches
        self._prompts = prompts
        self._data_rank = data_rank
        self._data_world_size = data_world_size
        self._returned: list[tuple[int, int, int]] = []
        """Heap of (group id, prompt index, sampling streams used)."""
        self._num_streamed = 0

    def returned_ids(self) -> list[int]:
        """Groups whose prompts came back and wait to be drawn again, ascending."""
        return sorted(group_id for group_id, _, _ in self._returned)

    @property
    def num_streamed(self) -> int:
        """Draws of this rank from the stream, those of prompts that came back not counted."""
        return self._num_streamed

    def draw(self) -> DrawnPrompt:
        """Take the next prompt.

        Returns:
            The prompt that came back with the lowest group id, else the next of the stream.

        Raises:
            RolloutError: if a batch of the stream does not hold one prompt per data rank.
        """
        if self._returned:
            group_id, prompt_index, num_requests = heapq.heappop(self._returned)
            return DrawnPrompt(
                group_id=group_id, prompt=self._prompts[prompt_index], num_requests=num_requests
            )
        batch = next(self._batches)
        if len(batch) != self._data_world_size:
            raise RolloutError(
                f"batch {self._num_streamed} of the prompt stream holds {len(batch)} prompts for "
                f"{self._data_world_size} data ranks; it must hold one for each"
            )
        group_id = self._num_streamed * self._data_world_size + self._data_rank
        self._num_streamed += 1
        return DrawnPrompt(group_id=group_id, prompt=batch[self._data_rank], num_requests=0)

    def upcoming(self, count: int) -> list[int]:
        """Groups that the next draws would give.

        Args:
            count: draws to look ahead.

        Returns:
            `count` group ids, in drawing order.
        """
        rounds = range(self._num_streamed, self._num_streamed + count)
        streamed = [one * self._data_world_size + self._data_rank for one in rounds]
        return [*self.returned_ids(), *streamed][:count]

    def put_back(self, group_id: int, prompt_index: int, num_requests: int) -> None:
        """Return a prompt whose group was dropped; it is drawn before the stream goes on.

        Args:
            group_id: number of the group; it keeps it.
            prompt_index: place of the prompt in the training set.
            num_requests: sampling streams its samples have used, >= 0.

        Raises:
            ValueError: if the group waits already, or a number is out of range.
        """
        if any(group_id == waiting for waiting, _, _ in self._returned):
            raise ValueError(f"group {group_id} was put back twice")
        entry = (group_id, prompt_index, num_requests)
        if min(entry) < 0 or prompt_index >= len(self._prompts):
            raise ValueError(
                f"group {group_id} cannot be put back with prompt {prompt_index} of "
                f"{len(self._prompts)} and {num_requests} sampling streams used"
            )
        heapq.heappush(self._returned, entry)

    def state_dict(self) -> dict[str, Any]:
        """JSON values; the position of the stream itself is in the loader's state.

        Returns:
            "returned", a list of [group id, prompt index, sampling streams used] in the order of
            the group ids, and "num_streamed".
        """
        return {
            "returned": [list(entry) for entry in sorted(self._returned)],
            "num_streamed": self._num_streamed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; what the queue held before is forgotten.

        Raises:
            CheckpointError: if it does not fit the training set; the queue is then unchanged.
        """
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
        self._num_streamed = state["num_streamed"]
