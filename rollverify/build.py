"""Composition root: turns a config into the objects of a run, and lists its hooks.

With `parts.py`, the only place that sees `Config` and everything else at once.
"""

import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rollverify.checkpoint import run_folder
from rollverify.checkpoint.checkpoint import Checkpointing, LoopState, RunCheckpoint
from rollverify.checkpoint.rank_state import RankState
from rollverify.config.check import check_world_size
from rollverify.config.schema import Config
from rollverify.data.loader import PromptLoader
from rollverify.data.prompts import Prompt
from rollverify.engine.engine import RolloutEngine
from rollverify.engine.model_folder import ModelFolder, RoutingShape, read_model_folder
from rollverify.engine.vllm_engine import make_engine
from rollverify.engine.weight_sync import WeightSync
from rollverify.errors import ConfigError
from rollverify.evaluation.stage import Evaluation
from rollverify.hooks import HookPoint, HookRegistry
from rollverify.launch.shutdown import StopRequest
from rollverify.losses.advantages import CreditRule, has_signal
from rollverify.losses.objective import Objective
from rollverify.metrics.json_lines import AuditLog, SlotLog
from rollverify.metrics.recorder import Recorder
from rollverify.metrics.rollout import RolloutMetrics, SlotTrace
from rollverify.metrics.routing import NativeMismatch, RoutingMetrics
from rollverify.metrics.throughput import Throughput
from rollverify.rewards import ANSWERS, Reward, counts_of, num_graders
from rollverify.rollout.accounting import Accounting
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.dynamic_sampling import SignalRule
from rollverify.rollout.inputs import encoded_batches, load_inputs, make_run_reward
from rollverify.rollout.ledger import PromptLedger
from rollverify.rollout.prompt_queue import EncodedPrompt, PromptQueue
from rollverify.rollout.request_loop import RequestLoop
from rollverify.rollout.rollouter import Rollouter
from rollverify.run import Run
from rollverify.toy.base_model import base_folder, is_prepared
from rollverify.training.policy_update import PolicyUpdate
from rollverify.training.scoring import TrajectoryScorer
from rollverify.verification.filtering import TrajectoryFilter, keep_close, keep_young
from rollverify.verification.scoring import AnchorScoring, OpsScoring
from rollverify.verification.stage import NoiseFloor, Verification
from rollverify.verification.switching import AcceptanceWindow, Switching
from torchtitan_ext.hf_folder import write_hf_folder
from torchtitan_ext.models.hf_config import ModelFolderError
from torchtitan_ext.packed_rows import PackedRow
from torchtitan_ext.policy_trainer import PolicyTrainer
from torchtitan_ext.process_group import init_process_group
from torchtitan_ext.reference_policy import ReferencePolicy
from torchtitan_ext.trainer_config import CHECKPOINT_FOLDER, TrainerSettings, build_policy_trainer


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
        loop=_request_loop(config, model, engine, buffer, encoded),
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
        num_graders=num_graders(config.data.reward, config.reward.num_workers),
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


COLLECTIVE_TIMEOUT_S = 600.0


def make_policy_trainer(
    config: Config, model: ModelFolder, folder: Path, *, is_resumed: bool
) -> PolicyTrainer:
    """The sharded policy; with the model folder's weights unless a checkpoint will be loaded.

    Collective: yes, over the world.
    """
    training, parallelism = config.training, config.parallelism
    settings = TrainerSettings(
        model_folder=str(model.path.resolve()),
        run_folder=str(folder),
        steps=training.steps,
        max_sequence_tokens=config.rollout.max_sequence_tokens,
        lr=training.lr,
        weight_decay=training.weight_decay,
        betas=(training.beta1, training.beta2),
        eps=training.eps,
        warmup_steps=training.warmup_steps,
        lr_decay=training.lr_decay,
        max_grad_norm=training.max_grad_norm,
        dtype=training.dtype,
        logprob_chunk_mib=training.logprob_chunk_mib,
        activation_checkpoint=training.activation_checkpoint,
        seed=config.run.seed,
        data_parallel_replicate=parallelism.data_parallel_replicate,
        data_parallel_shard=parallelism.data_parallel_shard,
        tensor_parallel=parallelism.tensor_parallel,
        expert_parallel=parallelism.expert_parallel,
        collective_timeout_s=int(COLLECTIVE_TIMEOUT_S),
    )
    try:
        policy = build_policy_trainer(settings)
    except ModelFolderError as error:
        raise ConfigError(f"model.path: {error}") from error
    if not is_resumed:
        # An empty checkpoint folder makes torchtitan read the model folder's weights. A checkpoint
        # is left to `RunCheckpoint`, which checks it first.
        policy.checkpointer.load()
    return policy


def make_policy_update(
    config: Config, policy: PolicyTrainer, routing: RoutingShape | None
) -> PolicyUpdate:
    """The optimizer steps with the configured loss; a reference only where a KL term needs it.

    Collective: yes, over the world, where there is a reference.
    """
    return PolicyUpdate(
        trainer=policy,
        objective=make_objective(config),
        credit=make_credit(config),
        micro_batch_tokens=config.training.micro_batch_tokens,
        temperature=config.rollout.temperature,
        aggregation=config.loss.aggregation,
        constant_length=config.rollout.max_response_tokens,
        minibatches=config.training.minibatches,
        reference=ReferencePolicy(policy) if config.kl.coefficient > 0.0 else None,
        replay=config.routing_replay.mode,
        routing=routing,
        masked_in_denominator=config.loss.masked_in_denominator,
        data_group=policy.data_group,
    )


def make_weight_sync(
    config: Config, engine: RolloutEngine, policy: PolicyTrainer, vocab_size: int
) -> WeightSync:
    """The transfer from trainer to engine, with a probe of ids spread over the vocabulary."""
    # The engine scores the probe as a prompt, which must leave room for one more token.
    context = config.rollout.max_sequence_tokens
    num_probe_tokens = min(config.weight_sync.probe_tokens, context - 1)
    probe = range(3, 3 + 7 * num_probe_tokens, 7)
    return WeightSync(
        engine=engine,
        parameters=policy.hf_parameters,
        trainer_score=_Scorer(policy),
        probe_ids=[number % vocab_size for number in probe],
        parity_tolerance=config.weight_sync.parity_tolerance,
    )


class _Scorer:
    """Log-probs of a token sequence by the trainer at temperature 1."""

    def __init__(self, policy: PolicyTrainer) -> None:
        self._policy = policy

    def __call__(self, token_ids: list[int]) -> list[float]:
        ids = torch.tensor(token_ids)
        row = PackedRow(tokens=ids[:-1], positions=torch.arange(len(ids) - 1), targets=ids[1:])
        return self._policy.score([row])[0].tolist()


def make_evaluation(
    config: Config,
    model: ModelFolder,
    engine: RolloutEngine,
    test: list[EncodedPrompt],
    policy: PolicyTrainer,
) -> Evaluation:
    """The pass over the test set; this rank takes its share."""
    read = ANSWERS.get(config.data.reward)
    return Evaluation(
        engine=engine,
        prompts=test,
        samples_per_problem=config.evaluation.samples_per_problem,
        temperature=config.evaluation.temperature,
        top_p=config.evaluation.top_p,
        max_response_tokens=config.rollout.max_response_tokens,
        max_num_seqs=config.engine.max_num_seqs,
        run_seed=config.run.seed,
        every_steps=config.evaluation.every_steps,
        last_step=config.training.steps,
        data_rank=policy.data_rank,
        data_world_size=policy.data_world_size,
        answer_of=(lambda token_ids: read(model.decode(token_ids))) if read else None,
        num_graders=num_graders(config.data.reward, config.reward.num_workers),
    )


def make_checkpoint(
    config: Config,
    folder: Path,
    policy: PolicyTrainer,
    rank_state: RankState,
    window: AcceptanceWindow,
    evaluation: Evaluation | None,
    rank: int,
) -> RunCheckpoint:
    """Checkpoints of model, optimizer, each rank's rollouts, acceptance window and test results."""

    def collect() -> dict[str, Any]:
        return {
            "window": window.state_dict(),
            "evaluation": evaluation.results if evaluation is not None else {},
        }

    def restore(values: dict[str, Any]) -> None:
        window.load_state_dict(values["window"])
        if evaluation is not None:
            evaluation.results = {int(step): m for step, m in values["evaluation"].items()}

    return RunCheckpoint(
        folder=folder / CHECKPOINT_FOLDER,
        checkpointer=policy.checkpointer,
        model_shapes=lambda: {k: tuple(v.shape) for k, v in policy.model.state_dict().items()},
        loop_state=LoopState(collect, restore),
        save_rank=rank_state.save,
        load_rank=rank_state.load,
        keep=config.checkpoint.keep,
        rank=rank,
    )


def make_window(config: Config) -> AcceptanceWindow:
    """The acceptance window; without `switching.enable` it is never asked."""
    return AcceptanceWindow(
        size=config.switching.window,
        threshold=config.switching.threshold,
        average=config.switching.average,
        reversible=config.switching.reversible,
    )


def scores_unfinished(config: Config) -> bool:
    """Whether the trainer scores what a phase leaves unfinished: to cut, to filter or to measure.

    Only then does routing replay need the experts of unfinished responses from the trainer.
    """
    method, verification = config.method.name, config.verification
    if method == "on_policy":
        return False
    return method == "rollverify" or config.filter.name == "ops" or verification.measure


def set_mode(
    config: Config, rollouter: Rollouter, window: AcceptanceWindow, policy_version: int
) -> None:
    """On-policy by the method or because the run has switched; after a resume, what may go on.

    A run that is resumed as rollverify drops what another method never verified, and one with
    routing replay what has no experts to replay.
    """
    has_switched = config.switching.enable and window.is_on_policy
    rollouter.is_on_policy = config.method.name == "on_policy" or has_switched
    if config.method.name == "rollverify":
        rollouter.drop_older(policy_version, verified=True)
    mode = config.routing_replay.mode
    if mode == "engine":
        rollouter.drop_unrouted(recorded_later=None)
    elif mode == "trainer" and scores_unfinished(config):
        rollouter.drop_unrouted(recorded_later=policy_version)


logger = logging.getLogger(__name__)


def build_run(argv: Sequence[str]) -> Run:
    """Build everything a command line asks for.

    Args:
        argv: command line without the program's name.

    Raises:
        UserError: for anything the user can cure.

    Source:
        Collective: yes, over the world.
    """
    loaded, resumed = run_folder.resolve(argv)
    config = loaded.config
    model = _model_folder(config)
    _check_experts(config, model)
    reward = make_run_reward(config)
    prompts, encoded, test = load_inputs(config, model, reward)
    rank, world_size = _join_ranks()
    check_world_size(config, world_size)
    folder = _shared_folder(config, resumed, rank)
    policy = make_policy_trainer(config, model, folder, is_resumed=resumed is not None)
    engine = make_engine(config, model)
    rollout = make_rollout_parts(config, model, engine, prompts, encoded, policy)
    evaluation = make_evaluation(config, model, engine, test, policy) if test else None
    window = make_window(config)
    checkpoint = make_checkpoint(config, folder, policy, rollout.state, window, evaluation, rank)
    first_step = 1
    if resumed is not None:
        first_step = checkpoint.load_latest(config.training.steps) + 1
    set_mode(config, rollout.rollouter, window, first_step - 1)
    recorder = _recorder(config, folder, rank, world_size, first_step)
    weight_sync = make_weight_sync(config, engine, policy, model.vocab_size)
    stages = make_stages(
        config,
        rollout,
        policy,
        window,
        lambda: AuditLog(folder, rank=rank, resume_step=first_step - 1),
        routing=model.routing,
        is_resumed=resumed is not None,
    )
    return Run(
        config=config,
        folder=folder,
        rank=rank,
        policy=policy,
        rollouter=rollout.rollouter,
        trainer=make_policy_update(config, policy, model.routing),
        weight_sync=weight_sync,
        hooks=build_hooks(
            _rollout_metrics(config, model, recorder, rollout, policy, reward),
            _slot_trace(rollout, policy, folder, rank, first_step),
            stages,
            weight_sync,
            evaluation,
        ),
        recorder=recorder,
        evaluation=evaluation,
        checkpointing=_checkpointing(config, checkpoint),
        engine=engine,
        reward=reward,
        save_in_flight=checkpoint.save_in_flight,
        export=lambda target: write_hf_folder(
            target, policy.hf_parameters(), source=model.path, is_writer=rank == 0
        ),
        stop=StopRequest(),
        first_step=first_step,
    )


def _join_ranks() -> tuple[int, int]:
    """(rank, world size). Collective: yes, over the world."""
    try:
        return init_process_group(COLLECTIVE_TIMEOUT_S)
    except dist.DistNetworkError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"the ranks cannot meet at {place} ({reason}); if the port is in use, choose another "
            "with torchrun's --rdzv-endpoint or MASTER_PORT"
        ) from error


def build_hooks(
    rollout_metrics: RolloutMetrics,
    slot_trace: SlotTrace,
    stages: Stages,
    weight_sync: WeightSync,
    evaluation: Evaluation | None,
) -> HookRegistry:
    """Register every hook; the order here is the order they run in."""
    hooks = HookRegistry()
    add = hooks.register_if

    add(HookPoint.AFTER_ROLLOUT, "rollout_metrics", rollout_metrics)
    add(HookPoint.AFTER_ROLLOUT, "slot_trace", slot_trace)
    add(HookPoint.AFTER_ROLLOUT, "native_mismatch", stages.native_mismatch)
    add(HookPoint.AFTER_ROLLOUT, "anchor_scoring", stages.anchor_scoring)

    add(HookPoint.AFTER_TRAIN, "mark_trained", stages.accounting.after_train)
    add(HookPoint.AFTER_TRAIN, "routing_metrics", stages.routing_metrics)
    add(HookPoint.AFTER_TRAIN, "noise_floor", stages.noise_floor)

    add(HookPoint.BEFORE_WEIGHT_SYNC, "ops_scoring", stages.ops_scoring)
    add(HookPoint.BEFORE_WEIGHT_SYNC, "filter", stages.filter)
    add(HookPoint.BEFORE_WEIGHT_SYNC, "verification", stages.verification)
    add(HookPoint.BEFORE_WEIGHT_SYNC, "switching", stages.switching)

    add(HookPoint.AFTER_WEIGHT_SYNC, "accounting", stages.accounting)
    add(HookPoint.AFTER_WEIGHT_SYNC, "throughput", Throughput(weight_sync=weight_sync))
    add(HookPoint.AFTER_WEIGHT_SYNC, "evaluation", evaluation)
    return hooks


def _slot_trace(
    rollout: RolloutParts, policy: PolicyTrainer, folder: Path, rank: int, first_step: int
) -> SlotTrace:
    return SlotTrace(
        rollouter=rollout.rollouter,
        slot_log=SlotLog(folder, rank=rank, resume_step=first_step - 1),
        data_group=policy.data_group,
    )


def _rollout_metrics(
    config: Config,
    model: ModelFolder,
    recorder: Recorder,
    rollout: RolloutParts,
    policy: PolicyTrainer,
    reward: Reward,
) -> RolloutMetrics:
    return RolloutMetrics(
        rollouter=rollout.rollouter,
        decode=model.decode,
        log_text=recorder.log_text,
        text_samples=config.metrics.text_samples,
        text_samples_every=config.metrics.text_samples_every,
        epoch=lambda: rollout.loader.last_batch_epoch,
        data_group=policy.data_group,
        grading_counts=counts_of(reward),
    )


def _model_folder(config: Config) -> ModelFolder:
    max_tokens = config.rollout.max_sequence_tokens
    if config.model.path:
        return read_model_folder(Path(config.model.path), max_tokens)
    if not is_prepared(config.prepare):
        raise ConfigError(
            "the base model is not prepared; run `python -m rollverify.toy.base_model` with the "
            "same flags first (./run_train.sh does), or set model.path"
        )
    return read_model_folder(base_folder(config.prepare), max_tokens)


def _check_experts(config: Config, model: ModelFolder) -> None:
    """Refuse what a dense model lacks or the experts do not allow, before anything is started."""
    mode, degree = config.routing_replay.mode, config.parallelism.expert_parallel
    if model.routing is None:
        for setting, is_set, cure in (
            (f"routing_replay.mode = '{mode}'", mode != "off", "routing_replay.mode = 'off'"),
            (f"parallelism.expert_parallel = {degree}", degree > 1, "it to 1"),
        ):
            if is_set:
                raise ConfigError(
                    f"{setting} needs a mixture-of-experts model, '{model.path}' is dense; set "
                    f"{cure} or another model"
                )
    elif model.routing.num_experts % degree:
        raise ConfigError(
            f"parallelism.expert_parallel = {degree} must divide the {model.routing.num_experts} "
            f"experts of '{model.path}'"
        )


def _checkpointing(config: Config, checkpoint: RunCheckpoint) -> Checkpointing:
    return Checkpointing(
        save=checkpoint.save,
        every_steps=config.checkpoint.every_steps,
        last_step=config.training.steps,
    )


def _recorder(
    config: Config, folder: Path, rank: int, world_size: int, first_step: int
) -> Recorder:
    return Recorder(
        folder,
        rank=rank,
        world_size=world_size,
        total_steps=config.training.steps,
        tensorboard=config.metrics.tensorboard,
        progress=True,
        resume_step=first_step - 1,
    )


def _shared_folder(config: Config, resumed: Path | None, rank: int) -> Path:
    """Rank 0 makes the run folder (or its error) and the others learn of it. Collective."""
    box: list[Any] = [None]
    if rank == 0:
        try:
            box[0] = str(resumed or run_folder.create(config))
        except ConfigError as error:
            box[0] = error
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], ConfigError):
        raise box[0]
    return Path(box[0])
