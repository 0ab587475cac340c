"""The switch to on-policy rollouts when too little of U_k survives (RollVerify Section 4.3)."""

import logging
from dataclasses import dataclass

from rollverify.hooks import StepState
from rollverify.rollout.rollouter import Rollouter
from rollverify.verification.window import AcceptanceWindow

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Switching:
    """Hook: feeds the acceptance window and carries out its decision."""

    window: AcceptanceWindow
    rollouter: Rollouter

    def __call__(self, state: StepState) -> None:
        """Decide by the step's acceptance rate, which is the same on every rank."""
        was_on_policy, rate = self.window.is_on_policy, state.acceptance_rate
        if not was_on_policy or self.window.settings.reversible:
            is_on_policy = self.window.update(rate)
            state.metrics["switching/acceptance_rate"] = rate
            if is_on_policy != was_on_policy:
                self._switch(state, is_on_policy)
        if self.window.average_rate is not None:
            state.metrics["switching/average_rate"] = self.window.average_rate
        state.metrics["switching/is_on_policy"] = float(self.window.is_on_policy)

    def _switch(self, state: StepState, is_on_policy: bool) -> None:
        self.rollouter.set_on_policy(is_on_policy)
        logger.info(
            "step %d: %s (acceptance rate of this step %.3f)",
            state.step,
            "rollouts are on-policy from now on; what is unfinished is dropped"
            if is_on_policy
            else "rollouts are partial again",
            state.acceptance_rate,
        )
        if is_on_policy:
            state.unfinished = []
