"""Writes how many requests ran at each engine step of a rollout phase, and how long responses are.

Runs at AFTER_ROLLOUT on every rank. Changes no trajectory and no metric; the loop that steps the
engine counts.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Protocol

import torch.distributed as dist

from rollverify.metrics.slot_log import SlotLog
from rollverify.state import StepState


class PhaseStats(Protocol):
    """What is read of the stats of a phase."""

    active: list[int]
    """Running requests of this rank at each engine step of the phase."""


class Rollouter(Protocol):
    """What is read of the rollouter."""

    @property
    def stats(self) -> PhaseStats:
        """Of the last phase."""
        ...


class SlotTrace:
    """Hook: a line of the slot log per phase."""

    def __init__(
        self, *, rollouter: Rollouter, slot_log: SlotLog, data_group: dist.ProcessGroup | None
    ) -> None:
        """Set up.

        Args:
            rollouter: gives the stats of its last phase.
            slot_log: takes a line per phase.
            data_group: ranks that hold different trajectories; None where there is one.
        """
        self._rollouter = rollouter
        self._slot_log = slot_log
        self._data_group = data_group

    def __call__(self, state: StepState) -> None:
        """Write the phase. Collective: yes, over the data ranks."""
        active = list(self._rollouter.stats.active)
        lengths = [len(one["response_ids"]) for one in state.finished]
        group = self._data_group
        if group is not None:
            parts: list[tuple[list[int], list[int]]] = [([], [])] * dist.get_world_size(group)
            dist.all_gather_object(parts, (active, lengths), group=group)
            active = summed([one for one, _ in parts])
            lengths = [length for _, part in parts for length in part]
        self._slot_log.write(state.step, active, lengths)


def summed(counts: Sequence[Sequence[int]]) -> list[int]:
    """Counts of all ranks by engine step; a rank that has ended its phase runs nothing.

    Args:
        counts: of each rank, one number per engine step; lengths may differ.
    """
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]
