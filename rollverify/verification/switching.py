"""Acceptance rate and the decision to stop partial rollouts when too little of them survives.

Does not end any rollout: `stages/switching.py` acts on the decision. RollVerify Section 4.3.
"""

import logging
import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, Protocol, cast

import torch.distributed as dist

from rollverify.errors import CheckpointError
from rollverify.hooks import StepState
from rollverify.ranks import reduce_metrics
from rollverify.verification.scoring import OpsScoring

AcceptanceAverage = Literal["window", "ema"]


def acceptance_rate(accepted_tokens: int, checked_tokens: int) -> float:
    """Share of the checked response tokens that verification kept.

    1 when nothing was checked: nothing was lost. Pass sums over all ranks, so that every rank
    comes to the same decision; a mean of rates of ranks would weigh them wrongly.

    Args:
        accepted_tokens: tokens kept, in [0, checked_tokens].
        checked_tokens: tokens of all unfinished trajectories before the cut, >= 0.

    Returns:
        Dimensionless, in [0, 1].

    Raises:
        ValueError: if the counts are negative or more is accepted than was checked.

    Source:
        RollVerify, Section 4.3 (alpha). Counting tokens, not trajectories, and the value without
        any are our choice where the paper is silent.
    """
    if not 0 <= accepted_tokens <= checked_tokens:
        raise ValueError(
            "accepted_tokens must be in [0, checked_tokens], "
            f"got {accepted_tokens} of {checked_tokens}"
        )
    return accepted_tokens / checked_tokens if checked_tokens else 1.0


class AcceptanceWindow:
    """Average acceptance rate over recent steps, and the switch to on-policy it calls for.

    Decides only once `size` rates have come in. One-way unless `reversible`; then the window starts
    empty after each change, so that either mode lasts at least `size` steps (on-policy steps leave
    nothing to check, count 1, and so end after `size` of them).
    """

    def __init__(
        self,
        *,
        size: int,
        threshold: float,
        average: AcceptanceAverage,
        reversible: bool = False,
    ) -> None:
        """Start in partial-rollout mode with an empty window.

        Args:
            size: steps in the window, >= 1; for "ema" the steps before a decision, and the
                weight of a new rate is 2 / (size + 1).
            threshold: rate in [0, 1]; on-policy when the average is below it, not at it.
            average: "window" is the mean of the last `size` rates, "ema" an exponential average
                that begins with the first rate.
            reversible: False stays on-policy for good once switched.

        Raises:
            ValueError: if an argument is out of range.
        """
        if size < 1:
            raise ValueError(f"size must be >= 1 steps, got {size}")
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(f"threshold must be in [0, 1], got {threshold}")
        if average not in ("window", "ema"):
            raise ValueError(f"average must be 'window' or 'ema', got {average!r}")
        self._size = size
        self._threshold = threshold
        self._average: AcceptanceAverage = average
        self._reversible = reversible
        self._rates: deque[float] = deque(maxlen=size)
        self._ema: float | None = None
        self._is_on_policy = False

    @property
    def is_on_policy(self) -> bool:
        """Whether the run has switched to on-policy rollouts.

        Source:
            RollVerify, Section 4.3.
        """
        return self._is_on_policy

    @property
    def is_reversible(self) -> bool:
        """Whether the run may come back from on-policy rollouts.

        Source:
            Our choice; the paper switches for good.
        """
        return self._reversible

    @property
    def is_full(self) -> bool:
        """Whether enough rates have come in to decide.

        Source:
            Our choice; the paper does not say what happens before.
        """
        return len(self._rates) == self._size

    @property
    def average_rate(self) -> float | None:
        """Average of the rates so far, also before the window is full; None without any.

        Source:
            RollVerify, Section 4.3; the weight of the exponential average is our choice.
        """
        if not self._rates:
            return None
        return self._ema if self._average == "ema" else math.fsum(self._rates) / len(self._rates)

    def update(self, rate: float) -> bool:
        """Take in one step's acceptance rate and decide.

        Args:
            rate: this step's acceptance rate, in [0, 1].

        Returns:
            Whether the next rollout is on-policy.

        Raises:
            ValueError: if the rate is not in [0, 1].

        Source:
            RollVerify, Section 4.3. Waiting for a full window is our choice where the paper is
            silent; the way back is ours.
        """
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"an acceptance rate must be in [0, 1], got {rate}")
        self._rates.append(rate)
        weight = 2.0 / (self._size + 1)
        self._ema = rate if self._ema is None else self._ema + weight * (rate - self._ema)
        average = self.average_rate
        if not self.is_full or average is None:
            return self._is_on_policy
        wants_on_policy = average < self._threshold
        if wants_on_policy != self._is_on_policy and (wants_on_policy or self._reversible):
            self._is_on_policy = wants_on_policy
            if self._reversible:
                self._rates.clear()
                self._ema = None
        return self._is_on_policy

    def state_dict(self) -> dict[str, Any]:
        """State as JSON values; the settings come from the config and are not in it."""
        return {
            "rates": list(self._rates),
            "ema": self._ema,
            "is_on_policy": self._is_on_policy,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; a smaller window keeps the latest rates."""
        raw_rates, ema = state.get("rates"), state.get("ema")
        is_on_policy = state.get("is_on_policy")
        rates = cast("list[Any]", raw_rates) if isinstance(raw_rates, list) else []
        is_valid = (
            isinstance(raw_rates, list)
            and all(_is_rate(rate) for rate in rates)
            and (_is_rate(ema) if rates else ema is None)
            and isinstance(is_on_policy, bool)
        )
        if not is_valid:
            raise CheckpointError(f"the state of the acceptance window is damaged: {dict(state)}")
        self._rates = deque(rates, maxlen=self._size)
        self._ema = ema
        self._is_on_policy = bool(is_on_policy)


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and 0.0 <= value <= 1.0


logger = logging.getLogger(__name__)


class Rollouter(Protocol):
    """What is told to the rollouter."""

    def set_on_policy(self, is_on_policy: bool) -> None:
        """Change the mode from the next phase on; True drops everything unfinished."""
        ...


class Switching:
    """Hook: feeds the acceptance window and carries out its decision."""

    def __init__(
        self,
        *,
        window: AcceptanceWindow,
        ops_scoring: OpsScoring,
        rollouter: Rollouter,
        data_group: dist.ProcessGroup | None,
    ) -> None:
        """Set up.

        Args:
            window: decides; part of a checkpoint. On-policy steps are fed to a reversible one.
            ops_scoring: has counted U_k in this step.
            rollouter: is told of a change.
            data_group: ranks that hold different trajectories; None where there is one.
        """
        self._window = window
        self._ops_scoring = ops_scoring
        self._rollouter = rollouter
        self._data_group = data_group

    def __call__(self, state: StepState) -> None:
        """Decide, the same on every rank. Collective: yes, over the data ranks."""
        was_on_policy = self._window.is_on_policy
        if not was_on_policy or self._window.is_reversible:
            rate = self._rate(state)
            is_on_policy = self._window.update(rate)
            state.metrics["switching/acceptance_rate"] = rate
            if is_on_policy != was_on_policy:
                self._switch(state, is_on_policy, rate)
        if self._window.average_rate is not None:
            state.metrics["switching/average_rate"] = self._window.average_rate
        state.metrics["switching/is_on_policy"] = float(self._window.is_on_policy)

    def _rate(self, state: StepState) -> float:
        held = sum(len(one["response_ids"]) for one in state.unfinished)
        sums = {"accepted": float(held), "checked": float(self._ops_scoring.num_checked_tokens)}
        if self._data_group is not None:
            sums, _ = reduce_metrics(sums, {}, self._data_group)
        return acceptance_rate(int(sums["accepted"]), int(sums["checked"]))

    def _switch(self, state: StepState, is_on_policy: bool, rate: float) -> None:
        self._rollouter.set_on_policy(is_on_policy)
        logger.info(
            "step %d: %s (acceptance rate of this step %.3f)",
            state.step,
            "rollouts are on-policy from now on; what is unfinished is dropped"
            if is_on_policy
            else "rollouts are partial again",
            rate,
        )
        if is_on_policy:
            state.unfinished = []
