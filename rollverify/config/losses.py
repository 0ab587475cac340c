"""Tables [loss] and [correction]: each loss and correction is the table of its own settings."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field

from rollverify.config.base import CountOrZero, Limit, NotNegative, Positive, Table
from rollverify.config.function import NAME_OF_A_FUNCTION

ClipLow = Annotated[float, Field(gt=0, le=1)]


class LossConfig(Table, frozen=True):
    """The policy loss: what all losses read."""

    function: ClassVar[str]
    """The loss itself, "module:function" in rollverify/losses/."""
    takes_weights: ClassVar[bool] = False
    """Whether it works the correction's weights in itself; else the loss is multiplied by them."""
    has_ratio: ClassVar[bool] = True
    """Whether it divides by `denominator`; if not, a correction weighs the policy itself."""

    name: str = "grpo"
    """grpo: clipped ratio. dr_grpo: without deviation and own length. gspo: clips the response's
    mean ratio; gspo_token: with token gradients. sapo: a soft gate. vespo: a smooth weight of the
    response's whole ratio. cispo: clipped weights that keep their gradient. decoupled_ppo: clip and
    capped weight. m2po: drops tokens by second moment. reinforce: no ratio. "module:function" or
    "file.py:function": your own (docs/losses.md)."""
    denominator: Literal["anchor_now", "anchor_at_sampling", "behavior"] = "anchor_now"
    """What the ratio divides by. anchor_now: the trainer before the step. anchor_at_sampling: the
    trainer under the version that sampled the token. behavior: the engine at sampling."""
    entropy_coefficient: Annotated[float, Field(ge=-1e9, le=1e9)] = 0.0
    """Times the mean entropy, subtracted from the loss; 0 turns it off."""
    mask_truncated: bool = False
    """Whether responses cut at the length limit are left out of the loss, but not of advantages."""
    masked_in_denominator: bool = True
    """Whether tokens that the correction (or m2po, decoupled_ppo) drops still count in the
    averages; if not, what is kept weighs more, and a scoring pass per step is added."""
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = "token_mean"
    """How token losses become one number; counts are global, over all ranks and micro-batches."""


class Grpo(LossConfig, frozen=True):
    """The clipped surrogate of PPO, with the group as baseline."""

    function = "clipped:grpo"
    name: Literal["grpo"] = "grpo"
    clip_low: ClipLow = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Positive = 0.3
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: NotNegative = 0.0
    """Largest ratio that counts for a negative advantage, above 1; 0 turns it off."""


class DrGrpo(LossConfig, frozen=True):
    """GRPO's token loss under centred advantages and a constant length."""

    function = "clipped:dr_grpo"
    name: Literal["dr_grpo"] = "dr_grpo"
    clip_low: ClipLow = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Positive = 0.2
    """The ratio is clipped above 1 + clip_high."""


class SequenceClip(LossConfig, frozen=True):
    """What the losses with one ratio per response share."""

    clip_low: ClipLow = 3e-4
    """The response's ratio is clipped below 1 - clip_low."""
    clip_high: Positive = 4e-4
    """The response's ratio is clipped above 1 + clip_high."""


class Gspo(SequenceClip, frozen=True):
    """One clipped ratio per response."""

    function = "sequence:gspo"
    name: Literal["gspo"] = "gspo"


class GspoToken(SequenceClip, frozen=True):
    """GSPO's ratio with the gradient of each token."""

    function = "sequence:gspo_token"
    name: Literal["gspo_token"] = "gspo_token"


class Sapo(LossConfig, frozen=True):
    """A soft gate instead of the clip."""

    function = "weighted:sapo"
    name: Literal["sapo"] = "sapo"
    tau_positive: Positive = 1.0
    """Temperature of the gate for positive advantages; larger closes it sooner."""
    tau_negative: Positive = 1.05
    """Temperature of the gate for the other advantages."""


class Vespo(LossConfig, frozen=True):
    """A smooth weight of the response's whole ratio."""

    function = "sequence:vespo"
    takes_weights = True
    name: Literal["vespo"] = "vespo"
    positive_power: NotNegative = 2.0
    """Exponent of the response's ratio, advantage >= 0."""
    positive_decay: NotNegative = 3.0
    """Exponential decay in the response's ratio, advantage >= 0."""
    negative_power: NotNegative = 3.0
    """Exponent of the response's ratio, advantage < 0."""
    negative_decay: NotNegative = 2.0
    """Exponential decay in the response's ratio, advantage < 0."""


class Cispo(LossConfig, frozen=True):
    """Clipped weights whose tokens keep their gradient."""

    function = "weighted:cispo"
    name: Literal["cispo"] = "cispo"
    clip_low: NotNegative = 1.0
    """The weight is at least 1 minus this; 1 or more: no lower bound."""
    clip_high: Positive = 4.0
    """The weight is at most 1 plus this, or this itself under the convention "absolute"."""
    convention: Literal["relative", "absolute"] = "relative"
    """How clip_high is meant: public code uses both."""


class DecoupledPpo(LossConfig, frozen=True):
    """The clip around the trainer before the step, and a weight from the engine to there."""

    function = "clipped:decoupled_ppo"
    name: Literal["decoupled_ppo"] = "decoupled_ppo"
    clip_low: ClipLow = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Positive = 0.2
    """The ratio is clipped above 1 + clip_high."""
    weight_cap: Limit = 5.0
    """Largest weight denominator / behavior; inf leaves it uncapped."""
    cap_action: Literal["mask", "clamp"] = "mask"
    """mask: tokens above the cap are dropped. clamp: they get the cap."""


class M2po(LossConfig, frozen=True):
    """No clip: the tokens with the largest squared log ratio are dropped."""

    function = "weighted:m2po"
    name: Literal["m2po"] = "m2po"
    threshold: Positive = 0.04
    """Bound of the mean squared log ratio of the tokens that are kept, nats^2."""


class Reinforce(LossConfig, frozen=True):
    """The policy gradient without a ratio."""

    function = "weighted:reinforce"
    has_ratio = False
    name: Literal["reinforce"] = "reinforce"


_LOSSES = (Grpo, DrGrpo, Gspo, GspoToken, Sapo, Vespo, Cispo, DecoupledPpo, M2po, Reinforce)
LOSSES: dict[str, type[LossConfig]] = {table().name: table for table in _LOSSES}
"""Table of each built-in loss."""


def named(names: tuple[str, ...]) -> AfterValidator:
    """Accepts one of the names, or a function of one's own."""

    def check(name: str) -> str:
        if name not in names and not NAME_OF_A_FUNCTION.fullmatch(name):
            known = ", ".join(map(repr, names))
            raise ValueError(f"must be one of {known}, 'module:function' or 'file.py:function'")
        return name

    return AfterValidator(check)


class CustomLoss(LossConfig, frozen=True):
    """A loss of one's own."""

    function = "custom:custom_loss"
    name: Annotated[str, named(tuple(LOSSES))]  # pyright: ignore[reportGeneralTypeIssues]: no default
    settings: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Keyword arguments of the function, for loss.name = "module:function"."""


class CorrectionConfig(Table, frozen=True):
    """Importance weights rho = denominator / behavior and masks, for any loss; measured if off."""

    name: Literal[
        "none", "truncated", "masked", "icepop", "geometric_mask", "mask_stale", "opsm"
    ] = "truncated"
    """truncated: rho, cut at a threshold. masked: rho inside a band, else 0. icepop: the same by
    token with its own band. geometric_mask: drops responses by their mean rho. mask_stale: drops
    old tokens. opsm: drops wrong responses that the policy has turned away from."""


class NoCorrection(CorrectionConfig, frozen=True):
    """Truncation by token is measured and not applied."""

    name: Literal["none"] = "none"
    threshold: Limit = 2.0
    """Weights are cut at this value in the metrics."""


class Truncated(CorrectionConfig, frozen=True):
    """Rho, cut at a threshold."""

    name: Literal["truncated"] = "truncated"
    level: Literal["token", "sequence"] = "token"
    """Whether rho is the token's or the product over the response."""
    threshold: Limit = 2.0
    """Weights are cut at this value."""


class Masked(CorrectionConfig, frozen=True):
    """Rho inside a band, else 0."""

    name: Literal["masked"] = "masked"
    level: Literal["token", "sequence"] = "token"
    """Whether rho is the token's or the product over the response."""
    low: NotNegative = 0.5
    """Smallest rho that is kept."""
    high: Limit = 2.0
    """Largest rho that is kept."""


class Icepop(CorrectionConfig, frozen=True):
    """Rho of the token inside a band, else 0."""

    name: Literal["icepop"] = "icepop"
    low: NotNegative = 0.5
    """Smallest rho that is kept."""
    high: Limit = 5.0
    """Largest rho that is kept."""


class GeometricMask(CorrectionConfig, frozen=True):
    """1 if the response's geometric mean of rho is inside a band, else 0."""

    name: Literal["geometric_mask"] = "geometric_mask"
    low: NotNegative = 0.99
    """Smallest geometric mean of rho over a response that is kept."""
    high: Limit = 1.01
    """Largest geometric mean of rho over a response that is kept."""


class MaskStale(CorrectionConfig, frozen=True):
    """1 for tokens that are young enough, else 0."""

    name: Literal["mask_stale"] = "mask_stale"
    max_age: CountOrZero = 1
    """Oldest tokens that are trained on, in steps."""


class Opsm(CorrectionConfig, frozen=True):
    """0 for responses with a negative advantage that the policy has turned away from, else 1."""

    name: Literal["opsm"] = "opsm"
    delta: NotNegative = 1e-4
    """Largest mean of log behavior - log policy of a response with negative advantage, nats."""


_CORRECTIONS = (NoCorrection, Truncated, Masked, Icepop, GeometricMask, MaskStale, Opsm)
CORRECTIONS: dict[str, type[CorrectionConfig]] = {table().name: table for table in _CORRECTIONS}
"""Table of each correction."""

UNIONS: dict[str, tuple[type[Table], Mapping[str, type[Table]], type[Table]]] = {
    "loss": (LossConfig, LOSSES, CustomLoss),
    "correction": (CorrectionConfig, CORRECTIONS, CorrectionConfig),
}
"""Base, classes by name, and what reads any other name, of the tables whose `name` decides."""


def name_in(table: str, entries: Mapping[str, Any]) -> object:
    """The loss or correction that the entries of [loss] or [correction] name."""
    return entries.get("name", UNIONS[table][0].model_fields["name"].default)


def class_of(table: str, entries: Mapping[str, Any]) -> type[Table]:
    """The class that the entries of [loss] or [correction] belong to."""
    name, (_, members, other) = name_in(table, entries), UNIONS[table]
    return members.get(name, other) if isinstance(name, str) else other


def _by_name(table: str) -> BeforeValidator:
    def read(value: Any) -> object:
        if not isinstance(value, dict):
            return value
        return class_of(table, cast(dict[str, Any], value)).model_validate(value)

    return BeforeValidator(read)


Loss = Annotated[LossConfig, _by_name("loss")]
Correction = Annotated[CorrectionConfig, _by_name("correction")]
