"""A resumable stream of global prompt batches, on torchdata's `StatefulDataLoader`.

The stream never ends: each epoch's order is a pure function of (seed, epoch), and a batch may cross
an epoch's end. Every data-parallel rank sees the same batches and takes its share elsewhere.
"""

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from rollverify.data.prompts import Prompt
from rollverify.data.seeding import permutation, random_stream
from rollverify.errors import CheckpointError, ConfigError

STATE_FORMAT = 1
"""Raised when the meaning of a saved state changes."""


def epoch_order(num_prompts: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The permutation of 0..num_prompts-1 in one epoch, from 0; without `shuffle` the file's."""
    if not shuffle:
        return list(range(num_prompts))
    return permutation(num_prompts, random_stream(seed, "epoch", epoch))


class PromptLoader(StatefulDataLoader[Prompt]):
    """Endless iterator over global batches of prompts, resumable after any batch.

    A set smaller than a batch repeats in order, so one batch may hold a prompt more than once:
    tell groups apart by their place in the batch, not by `prompt_id`.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, batch_size: int, seed: int, shuffle: bool = True
    ) -> None:
        """Start at the first prompt of epoch 0; `prompts` is the whole set, in file order."""
        if not prompts:
            raise ConfigError("the prompt set is empty; give data.train at least one line")
        if batch_size < 1:
            raise ConfigError(f"a batch needs at least 1 prompt, got {batch_size}")
        self._identity = {
            "format": STATE_FORMAT,
            "num_prompts": len(prompts),
            "prompts_hash": _hash_of(prompts),
            "seed": seed,
            "shuffle": shuffle,
        }
        self.num_drawn = 0
        """Prompts handed out since the start of epoch 0, over all batches."""
        self._num_prompts, self._prompts_per_batch = len(prompts), batch_size
        self._seed, self._shuffle = seed, shuffle
        self._epoch, self._order = -1, list[int]()
        with warnings.catch_warnings():
            # torchdata 0.11 calls a function that torch 2.13 has deprecated; nothing to act on
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            super().__init__(
                list(prompts),  # type: ignore[arg-type]  # any sequence serves as a map-style dataset
                batch_sampler=self._index_batches(),
                collate_fn=list,
                num_workers=0,  # no prefetch: the count is exactly what was handed out
                generator=torch.Generator(),  # an iterator draws a seed; not from the global state
            )
        self._batches = super().__iter__()

    def __iter__(self) -> "PromptLoader":
        return self

    def __next__(self) -> list[Prompt]:
        """Next global batch, `batch_size` prompts; never raises StopIteration."""
        return next(self._batches)

    def _index_batches(self) -> Iterator[list[int]]:
        while True:
            start = self.num_drawn
            self.num_drawn += self._prompts_per_batch
            yield [self.index_at(position) for position in range(start, self.num_drawn)]

    @property
    def last_batch_epoch(self) -> int:
        """Epoch of the first prompt of the batch handed out last (0 before any): to be logged."""
        return max(0, self.num_drawn - self._prompts_per_batch) // self._num_prompts

    def index_at(self, position: int) -> int:
        """Place in the set of the prompt at a place of the stream, drawn or not."""
        epoch, place = divmod(position, self._num_prompts)
        if epoch != self._epoch:
            self._order = epoch_order(self._num_prompts, self._seed, epoch, self._shuffle)
            self._epoch = epoch
        return self._order[place]

    def seek(self, num_drawn: int) -> None:
        """Go on after that many prompts of the stream."""
        if num_drawn < 0:
            raise ValueError(f"num_drawn must be >= 0, got {num_drawn}")
        self.num_drawn = num_drawn

    def state_dict(self) -> dict[str, Any]:
        """What the stream is and how far it was drawn, as JSON values."""
        return {**self._identity, "num_drawn": self.num_drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the batch at which the state was taken; `batch_size` may be another.

        Other prompts, seed or shuffle are a CheckpointError; the loader is then left as it was.
        """
        for key, expected in self._identity.items():
            if state_dict.get(key) != expected:
                raise CheckpointError(
                    f"the saved prompt position does not fit this run: {_MEANING[key]} was "
                    f"{state_dict.get(key)!r} and is {expected!r}; resume with the same data and "
                    "seed, or start a new run"
                )
        num_drawn = state_dict.get("num_drawn")
        if not isinstance(num_drawn, int) or num_drawn < 0:
            raise CheckpointError(
                f"the saved prompt position is damaged ({num_drawn!r} prompts drawn); resume from "
                "an older checkpoint"
            )
        self.seek(num_drawn)


_MEANING = {
    "format": "the format of the state",
    "num_prompts": "the number of prompts",
    "prompts_hash": "the content of the prompt file (hash)",
    "seed": "run.seed",
    "shuffle": "data.shuffle",
}


def _hash_of(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for prompt in prompts:
        digest.update(repr((prompt.prompt_id, prompt.text, prompt.answer)).encode("utf-8"))
    return digest.hexdigest()
