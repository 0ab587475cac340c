"""Builds what a rollout phase works with, and the stages that judge what it leaves unfinished.

Like `parts.py` it sees `Config`; what it builds gets plain values.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rollverify.algorithms.advantages import has_signal
from rollverify.algorithms.switching import AcceptanceWindow
from rollverify.config.schema import Config
from rollverify.data.loader import PromptLoader
from rollverify.data.prompts import Prompt
from rollverify.inputs import ModelFolder, encoded_batches
from rollverify.metrics.audit_log import AuditLog
from rollverify.mode import scores_unfinished
from rollverify.rank_state import RankState
from rollverify.rewards import Reward
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.dynamic_sampling import SignalRule
from rollverify.rollout.engine import RolloutEngine
from rollverify.rollout.ledger import PromptLedger
from rollverify.rollout.prompt_queue import EncodedPrompt, PromptQueue
from rollverify.rollout.request_loop import RequestLoop
from rollverify.rollout.rollouter import Rollouter
from rollverify.stages.accounting import Accounting
from rollverify.stages.anchor_scoring import AnchorScoring
from rollverify.stages.filtering import TrajectoryFilter, keep_close, keep_young
from rollverify.stages.noise_floor import NoiseFloor
from rollverify.stages.ops_scoring import OpsScoring
from rollverify.stages.routing_metrics import NativeMismatch, RoutingMetrics
from rollverify.stages.switching import Switching
from rollverify.stages.verification import Verification
from rollverify.training.routing import RoutingShape
from rollverify.training.scoring import TrajectoryScorer
from torchtitan_ext.policy_trainer import PolicyTrainer


@dataclass(frozen=True, kw_only=True)
class RolloutParts:
    """What one data rank's rollouts consist of."""

    loader: PromptLoader
    buffer: TrajectoryBuffer
    ledger: PromptLedger
    queue: PromptQueue
    rollouter: Rollouter
    state: RankState


def make_rollout_parts(
    config: Config,
    model: ModelFolder,
    engine: RolloutEngine,
    prompts: list[Prompt],
    encoded: list[EncodedPrompt],
    policy: PolicyTrainer,
    reward: Reward,
) -> RolloutParts:
    """The rollouter of this rank with all it works on."""
    rollout = config.rollout
    rank, world_size = policy.data_rank, policy.data_world_size
    loader = PromptLoader(
        prompts, batch_size=world_size, seed=config.run.seed, shuffle=config.data.shuffle
    )
    queue = PromptQueue(
        batches=encoded_batches(loader, prompts, encoded),
        prompts=encoded,
        data_rank=rank,
        data_world_size=world_size,
    )
    buffer, ledger = TrajectoryBuffer(group_size=rollout.group_size), PromptLedger()
    in_flight = rollout.oversampling * rollout.prompts_per_step * rollout.group_size
    rollouter = Rollouter(
        loop=_request_loop(config, model, engine, buffer, encoded, reward.num_threads),
        buffer=buffer,
        queue=queue,
        ledger=ledger,
        prompts_per_step=rollout.prompts_per_step,
        group_size=rollout.group_size,
        num_in_flight=math.ceil(in_flight / world_size),
        max_num_seqs=config.engine.max_num_seqs,
        count_every=rollout.count_every,
        is_on_policy=config.method.name == "on_policy",
        must_be_verified=config.method.name == "rollverify",
        data_rank=rank,
        data_world_size=world_size,
        data_group=policy.data_group,
        signal_rule=_signal_rule(config),
    )
    state = RankState(
        loader=loader,
        buffer=buffer,
        ledger=ledger,
        queue=queue,
        rollouter=rollouter,
        max_response_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        data_rank=rank,
        data_world_size=world_size,
    )
    return RolloutParts(
        loader=loader,
        buffer=buffer,
        ledger=ledger,
        queue=queue,
        rollouter=rollouter,
        state=state,
    )


def _signal_rule(config: Config) -> SignalRule | None:
    """What dynamic sampling asks of a group; None where every group is trained on."""
    if not config.dynamic_sampling.enable:
        return None
    max_batches = config.dynamic_sampling.max_dropped_batches
    return SignalRule(
        has_signal=has_signal,
        max_given_up=math.floor(max_batches * config.rollout.prompts_per_step),
        at_cap=config.dynamic_sampling.at_cap,
    )


def _request_loop(
    config: Config,
    model: ModelFolder,
    engine: RolloutEngine,
    buffer: TrajectoryBuffer,
    encoded: Sequence[EncodedPrompt],
    num_graders: int,
) -> RequestLoop:
    return RequestLoop(
        engine=engine,
        buffer=buffer,
        prompts=encoded,
        max_response_tokens=config.rollout.max_response_tokens,
        stop_token_id=model.stop_token_id,
        temperature=config.rollout.temperature,
        run_seed=config.run.seed,
        mask_older=config.rollout.mask_older_segments,
        routing=config.routing_replay.on_resume if config.routing_replay.mode == "engine" else None,
        num_graders=num_graders,
    )


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Hooks of the method, None where it has no use for one; `build_hooks` puts them in order."""

    accounting: Accounting
    native_mismatch: NativeMismatch | None = None
    routing_metrics: RoutingMetrics | None = None
    noise_floor: NoiseFloor | None = None
    anchor_scoring: AnchorScoring | None = None
    ops_scoring: OpsScoring | None = None
    filter: TrajectoryFilter | None = None
    verification: Verification | None = None
    switching: Switching | None = None


def make_stages(
    config: Config,
    parts: RolloutParts,
    policy: PolicyTrainer,
    window: AcceptanceWindow,
    audit_log: Callable[[], AuditLog],
    *,
    routing: RoutingShape | None,
    is_resumed: bool,
) -> Stages:
    """The stages that the method, the filter and the switch ask for.

    `audit_log` is called, and its file made, where something can be cut; in a resumed run too,
    since lines of steps that are taken again have to go, whatever the method is now.
    """
    group = policy.data_group
    must_verify = config.method.name == "rollverify"
    log = audit_log() if must_verify or is_resumed else None
    every_method = _every_method(config, parts, policy, routing)
    if config.method.name == "on_policy":
        return every_method
    verification = config.verification
    is_scored = scores_unfinished(config)
    mode = config.routing_replay.mode
    scorer = _scorer(config, policy, routing if mode != "off" else None)
    ops_scoring = OpsScoring(
        scorer=scorer if is_scored else None,
        reference=verification.reference,
        symmetric=verification.symmetric,
        data_group=group,
    )
    needs_anchor = is_scored and verification.reference == "anchor"
    return replace(
        every_method,
        anchor_scoring=AnchorScoring(scorer, records_routing=mode == "trainer")
        if needs_anchor
        else None,
        ops_scoring=ops_scoring,
        filter=_filter(config, parts, ops_scoring, policy) if config.filter.name != "off" else None,
        verification=_verification(config, parts, ops_scoring, policy, log)
        if must_verify and log is not None
        else None,
        noise_floor=NoiseFloor(
            segment_threshold=verification.segment_threshold, reference=verification.reference
        )
        if must_verify
        else None,
        switching=Switching(
            window=window, ops_scoring=ops_scoring, rollouter=parts.rollouter, data_group=group
        )
        if config.switching.enable
        else None,
    )


def _every_method(
    config: Config, parts: RolloutParts, policy: PolicyTrainer, routing: RoutingShape | None
) -> Stages:
    """Hooks that do not depend on the method: the ledgers, and the experts of a model with any."""
    group, every_steps = policy.data_group, config.routing_replay.measure_every
    accounting = Accounting(
        rollouter=parts.rollouter,
        buffer=parts.buffer,
        ledger=parts.ledger,
        queue=parts.queue,
        data_group=group,
    )
    if routing is None:
        return Stages(accounting=accounting)
    return Stages(
        accounting=accounting,
        native_mismatch=NativeMismatch(
            scorer=_scorer(config, policy, None), every_steps=every_steps, data_group=group
        )
        if every_steps
        else None,
        routing_metrics=RoutingMetrics(trainer=policy, rollouter=parts.rollouter, data_group=group),
    )


def _scorer(
    config: Config, policy: PolicyTrainer, routing: RoutingShape | None
) -> TrajectoryScorer:
    """Replays recorded experts if it is given their shape."""
    return TrajectoryScorer(
        trainer=policy,
        micro_batch_tokens=config.training.micro_batch_tokens,
        temperature=config.rollout.temperature,
        data_group=policy.data_group,
        routing=routing,
    )


def _filter(
    config: Config, parts: RolloutParts, ops_scoring: OpsScoring, policy: PolicyTrainer
) -> TrajectoryFilter:
    is_by_age = config.filter.name == "staleness"
    by_age, by_ops = keep_young(config.filter.max_staleness), keep_close(config.filter.max_ops)
    return TrajectoryFilter(
        keep=by_age if is_by_age else by_ops,
        discard=config.filter.discard,
        ops_scoring=ops_scoring,
        buffer=parts.buffer,
        ledger=parts.ledger,
        data_group=policy.data_group,
    )


def _verification(
    config: Config,
    parts: RolloutParts,
    ops_scoring: OpsScoring,
    policy: PolicyTrainer,
    audit_log: AuditLog,
) -> Verification:
    return Verification(
        ops_scoring=ops_scoring,
        buffer=parts.buffer,
        segment_threshold=config.verification.segment_threshold,
        token_threshold=config.verification.token_threshold,
        audit_log=audit_log,
        data_group=policy.data_group,
    )
