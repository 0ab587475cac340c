"""Composition root: turns a config into the objects of a run, and lists its hooks.

With `parts.py`, the only place that sees `Config` and everything else at once.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rollverify import run_folder
from rollverify.config.check import check_world_size
from rollverify.config.schema import Config
from rollverify.data_parts import load_inputs, make_run_reward
from rollverify.errors import ConfigError
from rollverify.hooks import HookPoint, HookRegistry
from rollverify.inputs import ModelFolder, read_model_folder
from rollverify.metrics.audit_log import AuditLog
from rollverify.metrics.recorder import Recorder
from rollverify.metrics.slot_log import SlotLog
from rollverify.mode import make_window, set_mode
from rollverify.parts import (
    COLLECTIVE_TIMEOUT_S,
    make_checkpoint,
    make_engine,
    make_evaluation,
    make_policy_trainer,
    make_policy_update,
    make_weight_sync,
)
from rollverify.prepare import base_folder, is_prepared
from rollverify.rewards import Reward
from rollverify.rollout.weight_sync import WeightSync
from rollverify.rollout_parts import (
    RolloutParts,
    Stages,
    make_rollout_parts,
    make_stages,
)
from rollverify.run import Run
from rollverify.shutdown import StopRequest
from rollverify.stages.checkpointing import Checkpointing
from rollverify.stages.evaluation import Evaluation
from rollverify.stages.rollout_metrics import RolloutMetrics
from rollverify.stages.slot_trace import SlotTrace
from rollverify.stages.throughput import Throughput
from rollverify.training.checkpoint import RunCheckpoint
from torchtitan_ext.hf_folder import write_hf_folder
from torchtitan_ext.policy_trainer import PolicyTrainer
from torchtitan_ext.process_group import init_process_group

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
    rollout = make_rollout_parts(config, model, engine, prompts, encoded, policy, reward)
    evaluation = make_evaluation(config, model, engine, test, policy, reward) if test else None
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
        grading_counts=reward.take_counts,
    )


def _model_folder(config: Config) -> ModelFolder:
    max_tokens = config.rollout.max_sequence_tokens
    if config.model.path:
        return read_model_folder(Path(config.model.path), max_tokens)
    if not is_prepared(config.prepare):
        raise ConfigError(
            "the base model is not prepared; run `python -m rollverify.prepare` with the same "
            "flags first (./run_train.sh does), or set model.path"
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
