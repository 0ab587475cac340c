"""Builds the objective of the optimizer step from the config.

Sees `Config`, like `parts.py`; what it builds gets plain values.
"""

from typing import Any

from rollverify.config.schema import Config
from rollverify.training.credit import CreditRule
from rollverify.training.objective import Objective


def make_objective(config: Config) -> Objective:
    """The loss, its correction and its extra terms."""
    return Objective(
        loss_name=config.loss.name,
        loss_settings=_loss_settings(config),
        denominator=config.loss.denominator,
        correction_name=config.correction.name,
        correction_settings=_correction_settings(config),
        kl_coefficient=config.kl.coefficient,
        kl_estimator=config.kl.estimator,
        entropy_coefficient=config.loss.entropy_coefficient,
    )


def make_credit(config: Config) -> CreditRule:
    """How rewards become advantages."""
    advantage = config.advantage
    return CreditRule(
        std=advantage.std,
        baseline=advantage.baseline,
        max_response_tokens=config.rollout.max_response_tokens,
        overlong_buffer_tokens=advantage.overlong_buffer_tokens,
        overlong_factor=advantage.overlong_factor,
        mask_truncated=config.loss.mask_truncated,
    )


def _loss_settings(config: Config) -> dict[str, Any]:
    """Keyword settings of the chosen loss."""
    loss = config.loss
    clip = {"clip_low": loss.clip_low, "clip_high": loss.clip_high}
    gspo_clip = {"clip_low": loss.gspo_clip_low, "clip_high": loss.gspo_clip_high}
    every: dict[str, dict[str, Any]] = {
        "grpo": clip | {"dual_clip": loss.dual_clip or None},
        "dr_grpo": clip,
        "gspo": gspo_clip,
        "gspo_token": gspo_clip,
        "sapo": {
            "tau_positive": loss.sapo_tau_positive,
            "tau_negative": loss.sapo_tau_negative,
        },
        "vespo": {
            "positive_power": loss.vespo_positive_power,
            "positive_decay": loss.vespo_positive_decay,
            "negative_power": loss.vespo_negative_power,
            "negative_decay": loss.vespo_negative_decay,
        },
        "cispo": {
            "clip_low": loss.cispo_clip_low,
            "clip_high": loss.cispo_clip_high,
            "convention": loss.cispo_convention,
        },
        "decoupled_ppo": clip
        | {
            "weight_cap": loss.decoupled_ppo_weight_cap,
            "cap_action": loss.decoupled_ppo_cap_action,
        },
        "m2po": {"threshold": loss.m2po_threshold},
        "reinforce": {},
    }
    return every[loss.name]


def _correction_settings(config: Config) -> dict[str, Any]:
    """Keyword settings of the chosen correction; of the measured one where it is off."""
    correction = config.correction
    every: dict[str, dict[str, Any]] = {
        "none": {"threshold": correction.threshold},
        "truncated": {"level": correction.level, "threshold": correction.threshold},
        "masked": {
            "level": correction.level,
            "low": correction.masked_low,
            "high": correction.masked_high,
        },
        "icepop": {"low": correction.icepop_low, "high": correction.icepop_high},
        "geometric_mask": {
            "low": correction.geometric_mask_low,
            "high": correction.geometric_mask_high,
        },
        "mask_stale": {"max_age": correction.mask_stale_max_age},
        "opsm": {"delta": correction.opsm_delta},
    }
    return every[correction.name]
