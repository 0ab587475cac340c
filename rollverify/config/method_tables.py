"""Tables [method], [verification], [switching], [filter] and [routing_replay].

They say what becomes of unfinished responses, and of what is known of their tokens. They hold
neither sampling nor optimizer settings; those are in `rollout_tables` and
`training_tables`.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from rollverify.config.setting import Range, Table


@dataclass(kw_only=True, slots=True, frozen=True)
class MethodConfig(Table):
    """The training method."""

    name: Literal["on_policy", "partial_rollout", "rollverify"] = "rollverify"
    """on_policy: every response is finished under the policy that started it. partial_rollout: the
    rest of the responses is paused when a batch is full and resumed under the next policy.
    rollverify: the same, but what that policy would not have sampled is cut first."""


@dataclass(kw_only=True, slots=True, frozen=True)
class VerificationConfig(Table):
    """The check of unfinished responses against the policy that will resume them.

    OPS, the off-policy shift, is D = |p_updated / p_reference - 1| of each sampled token. Only the
    method rollverify cuts by it.
    """

    segment_threshold: Annotated[float, Range(gt=0, allow_inf=True)] = 0.01
    """A response is cut before its first segment whose mean OPS reaches this; inf turns it off."""
    token_threshold: Annotated[float, Range(gt=0, allow_inf=True)] = 2.0
    """What is left is cut before its first token whose OPS reaches this; inf turns it off."""
    reference: Literal["anchor", "behavior"] = "anchor"
    """Log-probs that the updated ones are compared with. anchor: the trainer's, under the version
    that sampled the token. behavior: the engine's at sampling, which halves the scoring and adds
    the gap between engine and trainer to OPS."""
    symmetric: bool = False
    """Whether OPS is max(r, 1/r) - 1 of the ratio r, so that tokens the policy has turned away from
    can reach the token threshold; |r - 1| stays below 1 for them."""
    measure: bool = True
    """Whether unfinished responses are scored for the metrics even where no rule needs it, as with
    method partial_rollout; costs a forward pass per step."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SwitchingConfig(Table):
    """The change to on-policy rollouts once too little survives filter and verification."""

    enable: bool = True
    """Whether to switch at all; with method on_policy there is nothing to switch."""
    window: Annotated[int, Range(ge=1)] = 8
    """Steps whose acceptance rates are averaged; there is no decision before that many."""
    threshold: Annotated[float, Range(ge=0, le=1)] = 0.5
    """Switch when the average share of kept tokens is below this."""
    average: Literal["window", "ema"] = "window"
    """window: mean of the last `window` steps. ema: exponential, weight 2 / (window + 1)."""
    reversible: bool = False
    """Whether partial rollouts are tried again after `window` on-policy steps."""


@dataclass(kw_only=True, slots=True, frozen=True)
class FilterConfig(Table):
    """Baselines that discard whole unfinished responses instead of cutting them."""

    name: Literal["off", "staleness", "ops"] = "off"
    """staleness: discard by the age of the oldest segment. ops: discard by the mean OPS."""
    max_staleness: int = 4
    """Oldest segment that is kept, in steps, at least 1; for filter staleness."""
    max_ops: Annotated[float, Range(gt=0)] = 0.1
    """Largest mean OPS of a response that is kept; for filter ops."""
    discard: Literal["trajectory", "group"] = "trajectory"
    """trajectory: the response starts again from its prompt. group: the prompt is given up with all
    its responses."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RoutingReplayConfig(Table):
    """Experts of mixture-of-experts models: whose choice the trainer repeats.

    Without replay, engine and trainer can send a token to different experts, and a small difference
    of numbers becomes a large one of log-probs.
    """

    mode: Literal["off", "trainer", "engine"] = "off"
    """off: the router chooses in every pass. trainer: scoring after the step, and the steps of
    several minibatches, repeat the choice of the trainer's first pass (R2). engine: training and
    scoring repeat the choice that the engine made when it sampled (R3)."""
    on_resume: Literal["keep", "replace"] = "keep"
    """With mode engine, experts of the tokens that a resumed response holds. keep: as when they
    were sampled. replace: as the new policy chose when it read them again."""
    measure_every: Annotated[int, Range(ge=0)] = 0
    """Steps between two measurements of engine against trainer without replay, each a forward pass
    over the batch; 0 measures never."""
