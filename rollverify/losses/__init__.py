"""The policy losses, one signature for all, and the table of them.

A loss takes `LossInputs` and keyword settings and gives the token loss [T] and per-token
diagnostics. Which correction multiplies it and how it is averaged are other settings.
"""

from collections.abc import Callable

from torch import Tensor

from rollverify.losses.clipped import decoupled_ppo, dr_grpo, grpo
from rollverify.losses.inputs import Diagnostics, LossInputs
from rollverify.losses.sequence import gspo, gspo_token, vespo
from rollverify.losses.weighted import cispo, m2po, reinforce, sapo

__all__ = [
    "LOSSES",
    "NEEDS_LIMIT",
    "REPORTS_GATE",
    "TAKES_WEIGHTS",
    "WITHOUT_RATIO",
    "Diagnostics",
    "LossInputs",
]

LOSSES: dict[str, Callable[..., tuple[Tensor, Diagnostics]]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "sapo": sapo,
    "vespo": vespo,
    "cispo": cispo,
    "decoupled_ppo": decoupled_ppo,
    "m2po": m2po,
    "reinforce": reinforce,
}
"""Loss by the name it has in `loss.name`: (LossInputs, **settings) -> (token loss, diagnostics)."""

TAKES_WEIGHTS = frozenset({"vespo"})
"""Losses that work the correction's weights in themselves; all others are multiplied by them."""

WITHOUT_RATIO = frozenset({"reinforce"})
"""Losses that read no denominator: their correction weighs the policy itself."""

NEEDS_LIMIT = frozenset({"m2po"})
"""Losses that take a limit from the whole minibatch, which costs a scoring pass."""

REPORTS_GATE = frozenset({"sapo", "vespo"})
"""Losses whose diagnostics hold `gate`, the weight that takes the place of a clip."""
