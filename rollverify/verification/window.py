"""Acceptance rate, and when its average calls for on-policy rollouts (RollVerify Section 4.3)."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from rollverify.config.tables import SwitchingConfig
from rollverify.errors import CheckpointError


def acceptance_rate(accepted_tokens: int, checked_tokens: int) -> float:
    """Alpha: share of checked response tokens, summed over ranks, that were kept; 1 for none."""
    return accepted_tokens / checked_tokens if checked_tokens else 1.0


class AcceptanceWindow:
    """Average acceptance rate over recent steps, and the switch to on-policy it calls for.

    Decides only once it is full. One-way unless `reversible`; then it starts empty after each
    change, so that either mode lasts at least `window` steps (on-policy steps count 1).
    """

    def __init__(self, settings: SwitchingConfig) -> None:
        self.settings = settings
        self.is_on_policy: bool = False
        """Whether rollouts are on-policy by this window's decision."""
        self._rates: deque[float] = deque(maxlen=settings.window)
        self._ema: float | None = None

    @property
    def is_full(self) -> bool:
        """Whether enough rates have come in to decide."""
        return len(self._rates) == self.settings.window

    @property
    def average_rate(self) -> float | None:
        """Average of the rates so far, also before the window is full; None without any."""
        if not self._rates:
            return None
        is_exponential = self.settings.average == "ema"
        return self._ema if is_exponential else math.fsum(self._rates) / len(self._rates)

    def update(self, rate: float) -> bool:
        """Take in one step's rate, in [0, 1]; returns whether the next rollout is on-policy."""
        self._rates.append(rate)
        weight = 2.0 / (self.settings.window + 1)
        self._ema = rate if self._ema is None else self._ema + weight * (rate - self._ema)
        average = self.average_rate
        if not self.is_full or average is None:
            return self.is_on_policy
        wants_on_policy = average < self.settings.threshold
        may_change = wants_on_policy or self.settings.reversible
        if wants_on_policy != self.is_on_policy and may_change:
            self.is_on_policy = wants_on_policy
            if self.settings.reversible:
                self._rates.clear()
                self._ema = None
        return self.is_on_policy

    def state_dict(self) -> dict[str, Any]:
        """State as JSON values; the settings come from the config and are not in it."""
        return {"rates": list(self._rates), "ema": self._ema, "is_on_policy": self.is_on_policy}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; a smaller window keeps the latest rates."""
        rates, ema, is_on_policy = (state.get(key) for key in ("rates", "ema", "is_on_policy"))
        is_valid = (
            isinstance(rates, list)
            and all(map(_is_rate, rates))
            and (_is_rate(ema) if rates else ema is None)
            and isinstance(is_on_policy, bool)
        )
        if not is_valid:
            raise CheckpointError(f"the state of the acceptance window is damaged: {dict(state)}")
        self._rates = deque(rates or (), maxlen=self.settings.window)
        self._ema, self.is_on_policy = ema, bool(is_on_policy)


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and 0.0 <= value <= 1.0
