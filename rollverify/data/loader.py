"""A resumable stream of global prompt batches, on torchdata's `StatefulDataLoader`.

The stream never ends: it walks epoch after epoch, each in an order that is a pure function of
(seed, epoch), and a batch may cross an epoch's end. So no saved state can say "exhausted".
Batches are global: every data-parallel rank sees the same one and takes its share elsewhere.
This module does not read files (see `prompts.py`) and does not tokenise.
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
    """Order of the prompts in one epoch: a pure function of the arguments.

    Args:
        num_prompts: size of the set.
        seed: seed of the run.
        epoch: from 0.
        shuffle: False gives 0..num_prompts-1 in every epoch.

    Returns:
        A permutation of 0..num_prompts-1.
    """
    if not shuffle:
        return list(range(num_prompts))
    return permutation(num_prompts, random_stream(seed, "epoch", epoch))


class _BatchOrder:
    """Endless batches of prompt indices; torchdata saves and restores it as its batch sampler."""

    def __init__(self, num_prompts: int, batch_size: int, seed: int, shuffle: bool) -> None:
        self.num_prompts = num_prompts
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.num_drawn = 0
        self._epoch = -1
        self._order: list[int] = []

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield [self._draw() for _ in range(self.batch_size)]

    def _draw(self) -> int:
        epoch, position = divmod(self.num_drawn, self.num_prompts)
        if epoch != self._epoch:
            self._order = epoch_order(self.num_prompts, self.seed, epoch, self.shuffle)
            self._epoch = epoch
        self.num_drawn += 1
        return self._order[position]

    def state_dict(self) -> dict[str, int]:
        return {"num_drawn": self.num_drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        num_drawn = state["num_drawn"]
        if not isinstance(num_drawn, int) or num_drawn < 0:
            raise ValueError(f"the count of prompts handed out is {num_drawn!r}")
        self.num_drawn = num_drawn


class PromptLoader:
    """Endless iterator over global batches of prompts, resumable after any batch.

    A set smaller than a batch repeats in order, so one batch may hold a prompt more than once:
    tell groups apart by their place in the batch, not by `prompt_id`. The global torch random
    state is neither read nor advanced.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, batch_size: int, seed: int, shuffle: bool = True
    ) -> None:
        """Start at the first prompt of epoch 0.

        Args:
            prompts: the whole set, in file order; at least one.
            batch_size: prompts in each global batch, >= 1.
            seed: decides the order of every epoch.
            shuffle: False walks the set in file order.

        Raises:
            ConfigError: if there are no prompts or `batch_size` < 1.
        """
        if not prompts:
            raise ConfigError("the prompt set is empty; give data.train at least one line")
        if batch_size < 1:
            raise ConfigError(f"a batch needs at least 1 prompt, got {batch_size}")
        self._prompts = list(prompts)
        self._identity = {
            "format": STATE_FORMAT,
            "num_prompts": len(self._prompts),
            "prompts_hash": _hash_of(self._prompts),
            "seed": seed,
            "shuffle": shuffle,
        }
        self._order = _BatchOrder(len(self._prompts), batch_size, seed, shuffle)
        with warnings.catch_warnings():
            # torchdata 0.11 calls a function that torch 2.13 has deprecated; nothing to act on
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            self._loader: StatefulDataLoader[Prompt] = StatefulDataLoader(
                self._prompts,  # type: ignore[arg-type]  # any sequence serves as a map-style dataset
                batch_sampler=self._order,
                collate_fn=list,
                num_workers=0,  # no prefetch: the position is exactly what was handed out
                generator=torch.Generator(),  # an iterator draws a seed; not from the global state
            )
        self._batches: Iterator[list[Prompt]] = iter(self._loader)

    def __iter__(self) -> "PromptLoader":
        """The loader itself: several `for` loops go on with one stream."""
        return self

    def __next__(self) -> list[Prompt]:
        """Next global batch, `batch_size` prompts; never raises StopIteration."""
        return next(self._batches)

    @property
    def num_drawn(self) -> int:
        """Prompts handed out since the start of epoch 0, over all batches."""
        return self._order.num_drawn

    @property
    def epoch(self) -> int:
        """Epoch, from 0, of the next prompt: of the step that is about to run."""
        return self.num_drawn // len(self._prompts)

    @property
    def position(self) -> int:
        """Prompts of `epoch` handed out already, 0..num_prompts-1."""
        return self.num_drawn % len(self._prompts)

    @property
    def last_batch_epoch(self) -> int:
        """Epoch of the first prompt of the batch handed out last (0 before any): to be logged."""
        return max(0, self.num_drawn - self._order.batch_size) // len(self._prompts)

    def seek(self, num_drawn: int) -> None:
        """Go on at any place of the stream.

        Args:
            num_drawn: prompts of the stream before the next batch, >= 0.

        Raises:
            ValueError: if it is negative.
        """
        if num_drawn < 0:
            raise ValueError(f"num_drawn must be >= 0, got {num_drawn}")
        self._order.num_drawn = num_drawn
        self._batches = iter(self._loader)

    def index_at(self, position: int) -> int:
        """Place in the set of the prompt at a place of the stream, drawn or not.

        Args:
            position: prompts of the stream before it, >= 0.
        """
        epoch, place = divmod(position, len(self._prompts))
        order = self._order
        return epoch_order(len(self._prompts), order.seed, epoch, order.shuffle)[place]

    def state_dict(self) -> dict[str, Any]:
        """State as plain JSON values; a few hundred bytes whatever the size of the set.

        Returns:
            Dict for `load_state_dict` of a loader over the same prompts and seed.
        """
        return {
            **self._identity,
            "num_drawn": self.num_drawn,
            "loader": self._loader.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batch at which `state` was taken.

        `batch_size` may differ from the one saved: positions count prompts.

        Raises:
            CheckpointError: if the state is damaged, or was saved for other prompts, another seed
                or another shuffle setting; the loader is then left as it was.
        """
        for key, expected in self._identity.items():
            if state.get(key) != expected:
                raise CheckpointError(
                    f"the saved prompt position does not fit this run: {_MEANING[key]} was "
                    f"{state.get(key)!r} and is {expected!r}; resume with the same data and seed, "
                    "or start a new run"
                )
        before = self._loader.state_dict()
        try:
            self._restore(state["loader"])
            if self.num_drawn != state["num_drawn"]:
                raise ValueError("its two counts of prompts differ")
        except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
            self._restore(before)  # torchdata checks a state only in part, and while reading it
            raise CheckpointError(
                f"the saved prompt position is damaged ({type(error).__name__}: {error}); "
                "resume from an older checkpoint"
            ) from error

    def _restore(self, torchdata_state: dict[str, Any]) -> None:
        self._loader.load_state_dict(torchdata_state)
        self._batches = iter(self._loader)  # torchdata applies the state here


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
