"""What one iteration of the training loop knows; hooks read and edit it, nobody else owns it.

Holds no trainer, engine or configuration: hooks get those when they are constructed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensordict import TensorDict


@dataclass(kw_only=True, slots=True)
class StepState:
    """State of one iteration, made new at its start."""

    step: int
    """1 for the first iteration of a run; goes on counting after a resume."""

    policy_version: int
    """Version k of the trainer's policy: k optimizer steps were taken."""

    finished: list[TensorDict] = field(default_factory=list["TensorDict"])
    """F_k: the complete trajectories this iteration trains on."""

    unfinished: list[TensorDict] = field(default_factory=list["TensorDict"])
    """U_k: the trajectories left over, to be resumed in a later iteration."""

    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Values to be logged, already reduced over ranks; keys of `metrics/names.py`."""

    phase_s: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds each phase took, in the order the phases ran."""
