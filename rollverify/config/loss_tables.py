"""Tables [loss], [correction], [kl] and [advantage]: what the optimizer step minimises.

A setting that only some losses or corrections read is refused for the others; see `loss_rules`.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from rollverify.config.setting import Range, Table


@dataclass(kw_only=True, slots=True, frozen=True)
class LossConfig(Table):
    """The policy loss."""

    name: Literal[
        "grpo",
        "dr_grpo",
        "gspo",
        "gspo_token",
        "sapo",
        "vespo",
        "cispo",
        "decoupled_ppo",
        "m2po",
        "reinforce",
    ] = "grpo"
    """grpo: clipped surrogate. dr_grpo: the same, without deviation and own length. gspo: the
    clip is on the response's mean ratio; gspo_token: the same with token gradients. sapo: a soft
    gate. vespo: a smooth weight of the response's whole ratio. cispo: clipped weights that keep
    their gradient. decoupled_ppo: clip and weight with a cap. m2po: drops tokens by second moment.
    reinforce: no ratio."""
    denominator: Literal["anchor_now", "anchor_at_sampling", "behavior"] = "anchor_now"
    """What the ratio divides by. anchor_now: the trainer before the step. anchor_at_sampling: the
    trainer under the version that sampled the token. behavior: the engine at sampling."""
    clip_low: Annotated[float, Range(gt=0, le=1)] = 0.2
    """The ratio is clipped below 1 - clip_low; grpo, dr_grpo, decoupled_ppo."""
    clip_high: Annotated[float, Range(gt=0)] = 0.3
    """The ratio is clipped above 1 + clip_high; grpo, dr_grpo, decoupled_ppo."""
    dual_clip: Annotated[float, Range(gt=1, special=0)] = 0.0
    """Largest ratio that counts for a negative advantage, grpo only; 0 turns it off."""
    gspo_clip_low: Annotated[float, Range(gt=0, le=1)] = 3e-4
    """The response's ratio is clipped below 1 minus this."""
    gspo_clip_high: Annotated[float, Range(gt=0)] = 4e-4
    """The response's ratio is clipped above 1 plus this."""
    sapo_tau_positive: Annotated[float, Range(gt=0)] = 1.0
    """Temperature of the gate for positive advantages; larger closes it sooner."""
    sapo_tau_negative: Annotated[float, Range(gt=0)] = 1.05
    """Temperature of the gate for the other advantages."""
    vespo_positive_power: Annotated[float, Range(ge=0)] = 2.0
    """Exponent of the response's ratio, advantage >= 0."""
    vespo_positive_decay: Annotated[float, Range(ge=0)] = 3.0
    """Exponential decay in the response's ratio, advantage >= 0."""
    vespo_negative_power: Annotated[float, Range(ge=0)] = 3.0
    """Exponent of the response's ratio, advantage < 0."""
    vespo_negative_decay: Annotated[float, Range(ge=0)] = 2.0
    """Exponential decay in the response's ratio, advantage < 0."""
    cispo_clip_low: Annotated[float, Range(ge=0)] = 1.0
    """The weight is at least 1 minus this; 1 or more: no lower bound."""
    cispo_clip_high: Annotated[float, Range(gt=0)] = 4.0
    """The weight is at most 1 plus this, or this itself under the convention "absolute"."""
    cispo_convention: Literal["relative", "absolute"] = "relative"
    """How cispo_clip_high is meant: public code uses both."""
    decoupled_ppo_weight_cap: Annotated[float, Range(gt=0, allow_inf=True)] = 5.0
    """Largest weight denominator / behavior; inf leaves it uncapped."""
    decoupled_ppo_cap_action: Literal["mask", "clamp"] = "mask"
    """mask: tokens above the cap are dropped. clamp: they get the cap."""
    m2po_threshold: Annotated[float, Range(gt=0)] = 0.04
    """Bound of the mean squared log ratio of the tokens that are kept, nats^2."""
    entropy_coefficient: float = 0.0
    """Times the mean entropy, subtracted from the loss; 0 turns it off."""
    mask_truncated: bool = False
    """Whether responses cut at the length limit are left out of the loss (overlong filtering); they
    still count in their group's advantages."""
    masked_in_denominator: bool = True
    """Whether tokens that the correction (or m2po, decoupled_ppo) drops still count in the
    averages; if not, what is kept weighs more, and a scoring pass per step is added. Responses that
    mask_truncated leaves out never count."""
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = "token_mean"
    """How token losses become one number; counts are global, over all ranks and micro-batches."""


@dataclass(kw_only=True, slots=True, frozen=True)
class CorrectionConfig(Table):
    """Importance weights and masks between the engine that sampled and the trainer.

    They are about rho = denominator / behavior, multiply any loss, and are measured even when off.
    """

    name: Literal[
        "none", "truncated", "masked", "icepop", "geometric_mask", "mask_stale", "opsm"
    ] = "truncated"
    """truncated: rho, cut at a threshold. masked: rho inside a band, else 0. icepop: the same by
    token with its own band. geometric_mask: drops responses by their mean rho. mask_stale: drops
    old tokens. opsm: drops wrong responses that the policy has turned away from."""
    level: Literal["token", "sequence"] = "token"
    """Whether rho is the token's or the product over the response; truncated and masked."""
    threshold: Annotated[float, Range(gt=0, allow_inf=True)] = 2.0
    """Weights are cut at this value; truncated, and the metrics while the name is none."""
    masked_low: Annotated[float, Range(ge=0)] = 0.5
    """Smallest rho that is kept."""
    masked_high: Annotated[float, Range(gt=0, allow_inf=True)] = 2.0
    """Largest rho that is kept."""
    icepop_low: Annotated[float, Range(ge=0)] = 0.5
    """Smallest rho that is kept."""
    icepop_high: Annotated[float, Range(gt=0, allow_inf=True)] = 5.0
    """Largest rho that is kept."""
    geometric_mask_low: Annotated[float, Range(ge=0)] = 0.99
    """Smallest geometric mean of rho over a response that is kept."""
    geometric_mask_high: Annotated[float, Range(gt=0, allow_inf=True)] = 1.01
    """Largest geometric mean of rho over a response that is kept."""
    mask_stale_max_age: Annotated[int, Range(ge=0)] = 1
    """Oldest tokens that are trained on, in steps."""
    opsm_delta: Annotated[float, Range(ge=0)] = 1e-4
    """Largest mean of log behavior - log policy of a response with negative advantage, nats."""


@dataclass(kw_only=True, slots=True, frozen=True)
class KlConfig(Table):
    """Penalty on the distance to the weights the run started from."""

    coefficient: Annotated[float, Range(ge=0)] = 0.0
    """Times the mean KL estimate, added to the loss; 0 keeps no reference and costs nothing."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = log policy - log reference: k1 is d, k2 is d^2 / 2, k3 is exp(-d) - 1 + d."""


@dataclass(kw_only=True, slots=True, frozen=True)
class AdvantageConfig(Table):
    """How rewards of a group become advantages."""

    baseline: Literal["group_mean", "leave_one_out"] = "group_mean"
    """What is subtracted: the mean of the group, or that of the other responses."""
    std: Literal["unbiased", "population", "none"] = "unbiased"
    """Standard deviation the centred rewards are divided by; none only centres them."""
    overlong_buffer_tokens: Annotated[int, Range(ge=0)] = 0
    """Last tokens before rollout.max_response_tokens over which a penalty on the reward grows from
    0 to overlong_factor; 0 turns it off. Reward metrics stay without it."""
    overlong_factor: Annotated[float, Range(ge=0)] = 1.0
    """Penalty at rollout.max_response_tokens, in units of the reward."""
