"""A loss of one's own, `loss.name = "module:function"` (docs/losses.md).

Called with the row, [T] each, 0 outside the mask, and `loss.settings` as keywords; gives the token
loss [T], or that and flags [T] by the names of `token_flags`.
"""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from rollverify.config.function import load_function
from rollverify.config.losses import CustomLoss
from rollverify.errors import ConfigError
from rollverify.losses.inputs import Diagnostics, LossInputs, token_flags

_CLEARED = (
    "policy_logprobs",
    "denominator_logprobs",
    "behavior_logprobs",
    "anchor_logprobs",
    "sampling_anchor_logprobs",
    "advantages",
    "sequence_ids",
)


def check_custom_loss(settings: CustomLoss) -> None:
    """Import the function; ConfigError where `loss.settings` do not fit its parameters."""
    function = load_function("loss.name", settings.name)
    try:
        inspect.signature(function).bind(None, **settings.settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"loss.settings do not fit loss.name = {settings.name!r}, which is called with the row "
            f"and them as keywords: {error}"
        ) from None


def custom_loss(inputs: LossInputs, settings: CustomLoss) -> tuple[Tensor, Diagnostics]:
    """Call the function; ConfigError where it gives no finite loss [T] with flags."""
    mask_T = inputs.loss_mask
    cleared: dict[str, Any] = {
        name: torch.where(mask_T, getattr(inputs, name), 0) for name in _CLEARED
    }
    function = load_function("loss.name", settings.name)
    found = function(replace(inputs, **cleared), **settings.settings)
    has_flags = isinstance(found, tuple) and len(cast(tuple[Any, ...], found)) == 2
    loss_T, flags = cast(tuple[Any, Any], found if has_flags else (found, {}))
    known = token_flags(inputs)
    problem = None
    if not _is_row(loss_T, mask_T) or not loss_T.is_floating_point():
        problem = f"the loss of each token, a tensor {list(mask_T.shape)}, got {_kind(loss_T)}"
    elif not isinstance(flags, Mapping) or not known.keys() >= flags.keys():
        problem = f"no flags but {', '.join(known)}, got {_kind(flags)}"
    elif not all(_is_row(flag_T, mask_T) for flag_T in flags.values()):
        problem = f"flags {list(mask_T.shape)} like the loss"
    elif not bool(loss_T[mask_T].isfinite().all()):
        problem = "a finite loss of each trained token"
    if problem is not None:
        raise ConfigError(f"loss.name = {settings.name!r} must give {problem}")
    set_flags = {name: flag_T.detach().bool() for name, flag_T in flags.items()}
    return torch.where(mask_T, loss_T, 0.0), token_flags(inputs, **set_flags)


def _is_row(value: object, mask_T: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == mask_T.shape


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype}"
    return str(list(value)) if isinstance(value, Mapping) else type(value).__name__
