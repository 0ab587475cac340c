"""Named points of the training loop where optional stages run, and the registry of those stages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensordict import TensorDict


@dataclass(kw_only=True, slots=True)
class StepState:
    """State of one iteration, made new at its start."""

    step: int
    """From 1; goes on counting after a resume."""

    policy_version: int
    """k: optimizer steps taken."""

    finished: list[TensorDict] = field(default_factory=list["TensorDict"])
    """F_k, trained on in this iteration."""

    unfinished: list[TensorDict] = field(default_factory=list["TensorDict"])
    """U_k, resumed in a later iteration."""

    acceptance_rate: float = 1.0
    """Share of U_k's response tokens left after filter and verification, over all ranks."""

    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Reduced over ranks; keys of `metrics/names.py`."""

    phase_s: dict[str, float] = field(default_factory=dict[str, float])
    """In the order the phases ran."""


logger = logging.getLogger(__name__)

Hook = Callable[[StepState], None]


def hook_time_key(hook: str) -> str:
    """Key of a hook's seconds."""
    return f"time/hook/{hook}_s"


class HookPoint(StrEnum):
    """The four phase boundaries of one iteration, in the order they are reached."""

    AFTER_ROLLOUT = "after_rollout"
    """F_k and U_k are filled; the policy is still version k."""

    AFTER_TRAIN = "after_train"
    """The trainer holds version k + 1, the rollout engine version k."""

    BEFORE_WEIGHT_SYNC = "before_weight_sync"
    """Last moment before the engine gets version k + 1; U_k is verified here."""

    AFTER_WEIGHT_SYNC = "after_weight_sync"
    """Trainer and engine hold version k + 1."""


@dataclass(kw_only=True)
class HookRegistry:
    """Hooks by point, run in the order they were registered, equal on every rank.

    Hooks may use collectives. Each is timed into `state.metrics["time/hook/<name>_s"]`, so a name
    is used only once.
    """

    _hooks: dict[HookPoint, dict[str, Hook]] = field(
        default_factory=lambda: {point: {} for point in HookPoint}, init=False
    )

    def register(self, point: HookPoint, name: str, hook: Hook) -> None:
        """Append a hook to a point; its name becomes part of a metric key."""
        for other_point, hooks in self._hooks.items():
            if name in hooks:
                raise ValueError(
                    f"hook {name!r} is already registered at {other_point}; names are unique"
                )
        self._hooks[point][name] = hook

    def run(self, point: HookPoint, state: StepState) -> None:
        """Run the point's hooks in order; an error gets a note naming hook, point and step."""
        for name, hook in self._hooks[point].items():
            start_s = time.perf_counter()
            try:
                hook(state)
            except BaseException as error:  # Re-raised at once; an interrupt gets the note too.
                error.add_note(f"raised by hook '{name}' at {point}, step {state.step}")
                raise
            finally:
                state.metrics[hook_time_key(name)] = time.perf_counter() - start_s

    def names(self, point: HookPoint) -> list[str]:
        """Names of the point's hooks in running order."""
        return list(self._hooks[point])

    def log_order(self) -> None:
        """Log which hooks run where; call once, when all are registered."""
        for point, hooks in self._hooks.items():
            if hooks:
                logger.info("hooks at %s: %s", point, ", ".join(hooks))
