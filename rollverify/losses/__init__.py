"""The policy losses: `LossInputs` and a table of the config in, token loss [T] and flags out."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rollverify.config.losses import LossConfig
from rollverify.losses.clipped import decoupled_ppo, dr_grpo, grpo
from rollverify.losses.custom import custom_loss
from rollverify.losses.inputs import Diagnostics, LossInputs
from rollverify.losses.sequence import gspo, gspo_token, vespo
from rollverify.losses.weighted import cispo, m2po, reinforce, sapo

LossFunction = Callable[[LossInputs, Any], tuple[Tensor, Diagnostics]]

LOSS_FUNCTIONS: dict[str, LossFunction] = {
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
"""Loss by the name it has in `loss.name`."""

TAKES_WEIGHTS = frozenset({"vespo"})
"""Losses that work the correction's weights in themselves; all others are multiplied by them."""

WITHOUT_RATIO = frozenset({"reinforce"})
"""Losses that read no denominator: their correction weighs the policy itself."""


def loss_function(settings: LossConfig) -> LossFunction:
    """The function that takes these settings."""
    return LOSS_FUNCTIONS.get(settings.name, custom_loss)
