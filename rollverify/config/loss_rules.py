"""Rules over [loss], [correction], [advantage] and [training]: what cannot be combined.

Bounds of single settings are in `loss_tables`; the other rules are in `check`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollverify.config.rule_error import RuleError
from rollverify.config.setting import Table, settings_of

if TYPE_CHECKING:
    from rollverify.config.schema import Config

LOSS_SETTINGS: dict[str, tuple[str, ...]] = {
    "clip_low": ("grpo", "dr_grpo", "decoupled_ppo"),
    "clip_high": ("grpo", "dr_grpo", "decoupled_ppo"),
    "dual_clip": ("grpo",),
    "gspo_clip_low": ("gspo", "gspo_token"),
    "gspo_clip_high": ("gspo", "gspo_token"),
    "sapo_tau_positive": ("sapo",),
    "sapo_tau_negative": ("sapo",),
    "vespo_positive_power": ("vespo",),
    "vespo_positive_decay": ("vespo",),
    "vespo_negative_power": ("vespo",),
    "vespo_negative_decay": ("vespo",),
    "cispo_clip_low": ("cispo",),
    "cispo_clip_high": ("cispo",),
    "cispo_convention": ("cispo",),
    "decoupled_ppo_weight_cap": ("decoupled_ppo",),
    "decoupled_ppo_cap_action": ("decoupled_ppo",),
    "m2po_threshold": ("m2po",),
}
"""Settings of [loss] that only some losses read, with those losses."""

CORRECTION_SETTINGS: dict[str, tuple[str, ...]] = {
    "level": ("truncated", "masked"),
    "threshold": ("truncated", "none"),
    "masked_low": ("masked",),
    "masked_high": ("masked",),
    "icepop_low": ("icepop",),
    "icepop_high": ("icepop",),
    "geometric_mask_low": ("geometric_mask",),
    "geometric_mask_high": ("geometric_mask",),
    "mask_stale_max_age": ("mask_stale",),
    "opsm_delta": ("opsm",),
}
"""Settings of [correction] that only some corrections read, with those corrections."""

RATIO_WEIGHTS = ("truncated", "masked", "icepop")
"""Corrections whose weight is rho = denominator / behavior itself."""


MASKS = ("masked", "icepop", "geometric_mask", "mask_stale", "opsm")
"""Corrections that drop tokens."""


def check_loss_rules(config: Config) -> None:
    """Check every rule about the objective.

    Raises:
        RuleError: naming the first broken rule, its values and the cure.
    """
    _check_unread(config.loss, config.loss.name, LOSS_SETTINGS)
    _check_unread(config.correction, config.correction.name, CORRECTION_SETTINGS)
    _check_bands(config)
    _check_sequence_loss(config)
    _check_dr_grpo(config)
    _check_denominator(config)
    _check_own_weight(config)
    _check_masked(config)
    _check_advantage(config)
    _check_minibatches(config)


def _check_unread(table: Table, name: str, readers: dict[str, tuple[str, ...]]) -> None:
    """Refuse a changed setting that the chosen loss or correction never reads."""
    defaults = type(table)()
    for field, setting in settings_of(type(table)).items():
        value, names = getattr(table, field), readers.get(field, (name,))
        if name not in names and value != getattr(defaults, field):
            key, own = f"{setting.table}.name", " or ".join(repr(one) for one in names)
            raise RuleError(
                (setting.key, key),
                f"{setting.key} = {value!r} has no effect with {key} = {name!r}: only {own} reads "
                f"it; remove it or change {key}",
            )


def _check_bands(config: Config) -> None:
    correction = config.correction
    for name in ("masked", "icepop", "geometric_mask"):
        low, high = getattr(correction, f"{name}_low"), getattr(correction, f"{name}_high")
        if low > high:
            key = f"correction.{name}"
            raise RuleError(
                (f"{key}_low", f"{key}_high"),
                f"{key}_low must be <= {key}_high = {high}, got {low}: nothing would be kept",
            )


def _check_sequence_loss(config: Config) -> None:
    """Refuse what would take GSPO's ratio of the whole response apart again."""
    loss, correction = config.loss, config.correction
    if loss.name not in ("gspo", "gspo_token"):
        return
    if loss.aggregation != "sequence_mean":
        raise RuleError(
            ("loss.name", "loss.aggregation"),
            f"loss.name = {loss.name!r} needs loss.aggregation = 'sequence_mean', got "
            f"{loss.aggregation!r}: its loss belongs to a response; others weigh it by length",
        )
    is_by_token = correction.name in ("truncated", "masked") and correction.level == "token"
    if is_by_token or correction.name in ("icepop", "mask_stale"):
        level = " with level 'token'" if is_by_token else ""
        raise RuleError(
            ("loss.name", "correction.name", "correction.level"),
            f"correction.name = {correction.name!r}{level} weighs single tokens, but loss.name = "
            f"{loss.name!r} has one ratio per response; set correction.level = 'sequence', or "
            "correction.name = 'geometric_mask' or 'none'",
        )


def _check_dr_grpo(config: Config) -> None:
    loss, advantage = config.loss, config.advantage
    is_whole = advantage.std == "none" and loss.aggregation == "constant_length"
    if loss.name == "dr_grpo" and not is_whole:
        raise RuleError(
            ("loss.name", "advantage.std", "loss.aggregation"),
            "loss.name = 'dr_grpo' needs advantage.std = 'none' and loss.aggregation = "
            f"'constant_length', got {advantage.std!r} and {loss.aggregation!r}: its token loss is "
            "that of 'grpo'",
        )


def _check_denominator(config: Config) -> None:
    """Refuse denominators that were not recorded, are not read, or are corrected for twice."""
    loss, correction, verification = config.loss, config.correction, config.verification
    if loss.name == "reinforce" and loss.denominator != "anchor_now":
        raise RuleError(
            ("loss.name", "loss.denominator"),
            f"loss.denominator = {loss.denominator!r} has no effect with loss.name = 'reinforce', "
            "which has no ratio; leave it at 'anchor_now'",
        )
    if loss.denominator == "behavior" and correction.name in RATIO_WEIGHTS:
        raise RuleError(
            ("loss.denominator", "correction.name"),
            f"loss.denominator = 'behavior' with correction.name = {correction.name!r} counts the "
            "gap to the engine twice: the ratio divides by its log-probs already; set "
            "correction.name = 'none'",
        )
    if loss.denominator != "anchor_at_sampling" or config.method.name == "on_policy":
        return  # With on_policy every token is fresh, and the policy before the step its anchor.
    is_scored = config.method.name == "rollverify" or config.filter.name == "ops"
    if verification.reference != "anchor" or not (is_scored or verification.measure):
        raise RuleError(
            ("loss.denominator", "verification.reference", "verification.measure"),
            "loss.denominator = 'anchor_at_sampling' needs the anchors of stale tokens, which are "
            f"not recorded with verification.reference = {verification.reference!r} and "
            f"verification.measure = {str(verification.measure).lower()}; set "
            "verification.reference = 'anchor' and verification.measure = true, or "
            "loss.denominator = 'behavior'",
        )


def _check_own_weight(config: Config) -> None:
    loss, correction = config.loss, config.correction
    if loss.name != "decoupled_ppo":
        return
    if correction.name in RATIO_WEIGHTS:
        raise RuleError(
            ("loss.name", "correction.name"),
            f"loss.name = 'decoupled_ppo' with correction.name = {correction.name!r} would weigh "
            "by denominator / behavior twice; set correction.name = 'none' (its own weight has "
            "loss.decoupled_ppo_weight_cap)",
        )
    if loss.denominator == "behavior":
        raise RuleError(
            ("loss.name", "loss.denominator"),
            "loss.name = 'decoupled_ppo' needs a denominator apart from loss.denominator = "
            "'behavior', where its weight is always 1; set 'anchor_now' or loss.name = 'grpo'",
        )


def _check_masked(config: Config) -> None:
    """Refuse smaller averages, which cost a scoring pass, where nothing is ever dropped."""
    loss, name = config.loss, config.correction.name
    drops = loss.name == "decoupled_ppo" and loss.decoupled_ppo_cap_action == "mask"
    if loss.masked_in_denominator or drops or loss.name == "m2po" or name in MASKS:
        return
    raise RuleError(
        ("loss.masked_in_denominator", "correction.name", "loss.name"),
        f"loss.masked_in_denominator = false has no effect with correction.name = {name!r} and "
        f"loss.name = {loss.name!r}, which drop no token; remove it, or set correction.name to one "
        f"of {', '.join(MASKS)}",
    )


def _check_advantage(config: Config) -> None:
    advantage, longest = config.advantage, config.rollout.max_response_tokens
    if advantage.baseline == "leave_one_out" and advantage.std != "none":
        raise RuleError(
            ("advantage.baseline", "advantage.std"),
            "advantage.baseline = 'leave_one_out' needs advantage.std = 'none', got "
            f"{advantage.std!r}: divided by a deviation it would only be another scale of "
            "'group_mean'",
        )
    if advantage.overlong_buffer_tokens > longest:
        raise RuleError(
            ("advantage.overlong_buffer_tokens", "rollout.max_response_tokens"),
            "advantage.overlong_buffer_tokens must be <= rollout.max_response_tokens = "
            f"{longest}, got {advantage.overlong_buffer_tokens}",
        )


def _check_minibatches(config: Config) -> None:
    prompts, minibatches = config.rollout.prompts_per_step, config.training.minibatches
    if prompts % minibatches:
        raise RuleError(
            ("training.minibatches", "rollout.prompts_per_step"),
            f"training.minibatches must divide rollout.prompts_per_step = {prompts}, got "
            f"{minibatches}: a minibatch takes whole prompts, as many as the others",
        )
