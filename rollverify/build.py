"""Composition root: turns a config into the objects of a run, and lists its hooks.

The only place that sees the whole `Config` and everything else at once.
"""

import math
from pathlib import Path
from typing import Any

import torch

from rollverify.checkpoint import run_folder
from rollverify.checkpoint.checkpoint import Checkpointing, LoopState, RunCheckpoint
from rollverify.checkpoint.rank_file import RankState
from rollverify.config.environment import set_defaults
from rollverify.config.rules import check_world_size
from rollverify.config.tables import Config
from rollverify.data.loader import PromptLoader
from rollverify.data.prompts import Prompt
from rollverify.engine.engine import RolloutEngine
from rollverify.engine.model_folder import (
    ModelFolder,
    RoutingShape,
    check_expert_settings,
)
from rollverify.engine.shared import SharedEngine
from rollverify.engine.start import start_engine
from rollverify.engine.weight_sync import WeightSync
from rollverify.errors import ConfigError
from rollverify.evaluation.evaluator import Evaluator
from rollverify.evaluation.stage import Evaluation
from rollverify.hooks import HookPoint, HookRegistry
from rollverify.launch.devices import check_devices
from rollverify.launch.shutdown import StopRequest
from rollverify.launch.world import join_world
from rollverify.losses.advantages import CreditRule, has_signal
from rollverify.losses.objective import Objective
from rollverify.metrics.gpu import GpuFigures
from rollverify.metrics.json_lines import AuditLog, SlotLog
from rollverify.metrics.recorder import Recorder
from rollverify.metrics.rollout import RolloutMetrics, SlotTrace
from rollverify.metrics.routing import NativeMismatch, RoutingMetrics
from rollverify.metrics.throughput import Throughput
from rollverify.ranks import Ranks
from rollverify.rewards import Reward
from rollverify.rollout.accounting import Accounting
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.exchange import work_of
from rollverify.rollout.inputs import (
    encoded_batches,
    load_inputs,
    load_model_folder,
    make_run_reward,
    with_stop_tokens,
)
from rollverify.rollout.ledger import PromptLedger
from rollverify.rollout.prompt_queue import EncodedPrompt, PromptQueue
from rollverify.rollout.requests import RequestLoop
from rollverify.rollout.rollouter import Rollouter
from rollverify.rollout.twins import Twins, roll_out_ranks
from rollverify.run import Run, drop_what_may_not_resume, scores_unfinished
from rollverify.training.policy_update import PolicyUpdate
from rollverify.training.scoring import TrajectoryScorer
from rollverify.verification.filters import TrajectoryFilter
from rollverify.verification.metrics import NoiseFloor, TrainedMetrics
from rollverify.verification.packing_noise import PackingNoise
from rollverify.verification.scoring import AnchorScoring, OpsScoring
from rollverify.verification.stage import Verification
from rollverify.verification.switching import Switching
from rollverify.verification.window import AcceptanceWindow
from torchtitan_ext.flash_attention import AttentionError
from torchtitan_ext.hf_folder import write_hf_folder
from torchtitan_ext.models.hf_config import ModelFolderError
from torchtitan_ext.packed_rows import PackedRow
from torchtitan_ext.policy_trainer import PolicyTrainer
from torchtitan_ext.reference_policy import ReferencePolicy
from torchtitan_ext.trainer_config import CHECKPOINT_FOLDER, TrainerSettings, build_policy_trainer

ENGINE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_run(config: Config, resumed: Path | None = None) -> Run:
    """Build everything a config asks for; in a plain Python process a run of one rank.

    Collective over the world.

    Args:
        config: of the whole run.
        resumed: folder of the run to go on with; None for a new one.

    Raises:
        UserError: for anything the user can cure.
    """
    set_defaults(deterministic=config.run.deterministic and torch.cuda.is_available())
    check_devices(config)
    # What the user can cure is found before anything large is loaded: a loss of one's own, too.
    objective = Objective(loss=config.loss, correction=config.correction, kl=config.kl)
    model = load_model_folder(config)
    check_expert_settings(model, config.routing_replay.mode, config.parallelism.expert_parallel)
    model = with_stop_tokens(config, model)
    reward = make_run_reward(config)
    prompts, encoded, test = load_inputs(config, model, reward)
    world = join_world(config.parallelism)
    check_world_size(config, world.size)
    folder = run_folder.open_together(config, resumed, world)

    policy = _policy_trainer(config, model, folder, is_resumed=resumed is not None)
    parallelism = config.parallelism
    ranks, twins = roll_out_ranks(
        config.engine.tensor_parallel, parallelism.tensor_parallel, timeout_s=parallelism.timeout_s
    )
    engine = start_engine(
        model,
        config.engine,
        max_sequence_tokens=config.rollout.max_sequence_tokens,
        seed=config.run.seed,
        record_routing=config.routing_replay.mode == "engine",
        reserved_bytes=policy.optimizer_bytes,
    )
    rollouts = _rollouts(config, model, engine, prompts, encoded, ranks, twins, policy, reward)
    evaluation = make_evaluation(config, model, engine, test, ranks, reward) if test else None
    window = AcceptanceWindow(config.switching)
    checkpoint = _checkpoint(config, folder, policy, rollouts, window, evaluation)
    done = 0 if resumed is None else checkpoint.load_latest(config.training.steps)
    policy.offload_optimizer()
    drop_what_may_not_resume(config, rollouts.rollouter, window, done)

    run = Run(
        config=config,
        folder=folder,
        rank=world.rank,
        policy=policy,
        rollouter=rollouts.rollouter,
        trainer=_policy_update(config, policy, objective, model.routing, twins),
        weight_sync=_weight_sync(config, engine, policy, model.vocab_size),
        hooks=HookRegistry(),
        recorder=_recorder(config, folder, world, done),
        evaluation=evaluation,
        checkpointing=Checkpointing(
            save_step=checkpoint.save,
            every_steps=config.checkpoint.every_steps,
            last_step=config.training.steps,
        ),
        engine=engine,
        reward=reward,
        save_in_flight=checkpoint.save_in_flight,
        finish_checkpoint=checkpoint.finish,
        export=lambda target: write_hf_folder(
            target, policy.hf_parameters(), source=model.path, is_writer=world.rank == 0
        ),
        stop=StopRequest(),
        first_step=done + 1,
    )
    _register_hooks(run, rollouts, window, model, is_resumed=resumed is not None)
    return run


def _recorder(config: Config, folder: Path, world: Ranks, done: int) -> Recorder:
    return Recorder(
        folder=folder,
        rank=world.rank,
        world_size=world.size,
        total_steps=config.training.steps,
        tensorboard=config.metrics.tensorboard,
        progress=True,
        resume_step=done,
    )


def _policy_update(
    config: Config,
    policy: PolicyTrainer,
    objective: Objective,
    routing: RoutingShape | None,
    twins: Twins,
) -> PolicyUpdate:
    """The optimizer steps; with a reference model only where a KL term needs it."""
    credit = CreditRule(
        settings=config.advantage,
        max_response_tokens=config.rollout.max_response_tokens,
        mask_truncated=config.loss.mask_truncated,
    )
    return PolicyUpdate(
        trainer=policy,
        objective=objective,
        credit=credit,
        training=config.training,
        temperature=config.rollout.temperature,
        reference=ReferencePolicy(policy) if config.kl.coefficient > 0.0 else None,
        replay=config.routing_replay.mode,
        routing=routing,
        ranks=Ranks.of(policy.data_group),
        twins=twins,
    )


def _register_hooks(
    run: Run,
    rollouts: RankState,
    window: AcceptanceWindow,
    model: ModelFolder,
    *,
    is_resumed: bool,
) -> None:
    """Register every hook; the order here is the order they run in."""
    config, policy, rollouter, done = run.config, run.policy, run.rollouter, run.first_step - 1
    ranks, add, against = rollouter.ranks, run.hooks.register, config.verification.against
    is_partial, is_verified = config.method.name != "on_policy", config.method.name == "rollverify"
    replay, measure_every = config.routing_replay.mode, config.routing_replay.measure_every
    # In a resumed run too: lines of steps that are taken again have to go, whatever the method.
    audit_log = None
    if is_verified or is_resumed:
        audit_log = AuditLog(run.folder, rank=run.rank, resume_step=done)

    replayed = model.routing if replay != "off" else None
    scorer = _scorer(run, replayed) if scores_unfinished(config) else None

    rollout_metrics = RolloutMetrics(
        rollouter=rollouter,
        decode=model.decode,
        log_text=run.recorder.log_text,
        metrics=config.metrics,
        epoch=lambda: rollouts.loader.last_batch_epoch,
        ranks=ranks,
        grading_counts=run.reward.take_counts,
    )
    add(HookPoint.AFTER_ROLLOUT, "rollout_metrics", rollout_metrics)
    slots = SlotLog(run.folder, rank=run.rank, resume_step=done)
    add(HookPoint.AFTER_ROLLOUT, "slot_trace", SlotTrace(rollouter=rollouter, slot_log=slots))
    if model.routing is not None and measure_every:
        plain = _scorer(run, None)
        native = NativeMismatch(scorer=plain, every_steps=measure_every, ranks=ranks)
        add(HookPoint.AFTER_ROLLOUT, "native_mismatch", native)
    if scorer is not None and against == "anchor":
        anchors = AnchorScoring(scorer=scorer, records_routing=replay == "trainer")
        add(HookPoint.AFTER_ROLLOUT, "anchor_scoring", anchors)
    if scorer is not None and config.verification.packing_noise_every:
        # What is finished has no experts of the trainer's own first pass (R2) to replay.
        same = _scorer(run, model.routing if replay == "engine" else None)
        packing_noise = PackingNoise(scorer=same, settings=config.verification, ranks=ranks)
        add(HookPoint.AFTER_ROLLOUT, "packing_noise", packing_noise)

    accounting = Accounting(rollouter=rollouter)
    add(HookPoint.AFTER_TRAIN, "mark_trained", accounting.after_train)
    if model.routing is not None:
        routing = RoutingMetrics(
            trainer=policy, rollouter=rollouter, ranks=ranks, data_ranks=run.trainer.ranks
        )
        add(HookPoint.AFTER_TRAIN, "routing_metrics", routing)
    add(HookPoint.AFTER_TRAIN, "trained_metrics", TrainedMetrics(trainer=run.trainer))
    if is_verified:
        add(HookPoint.AFTER_TRAIN, "noise_floor", NoiseFloor(settings=config.verification))

    if is_partial:
        verification = _verification(config, rollouts, scorer, audit_log, ranks)
        add(HookPoint.BEFORE_WEIGHT_SYNC, "verification", verification)
        if config.switching.enable:
            switching = Switching(window=window, rollouter=rollouter)
            add(HookPoint.BEFORE_WEIGHT_SYNC, "switching", switching)

    add(HookPoint.AFTER_WEIGHT_SYNC, "accounting", accounting)
    add(HookPoint.AFTER_WEIGHT_SYNC, "throughput", _throughput(run))
    if run.evaluation is not None:
        add(HookPoint.AFTER_WEIGHT_SYNC, "evaluation", run.evaluation)


def _throughput(run: Run) -> Throughput:
    policy, gpu = run.policy, None
    if policy.device.type != "cpu":
        gpu = GpuFigures(
            flops=policy.flops, peak_flops=policy.peak_flops, num_ranks=Ranks.world().size
        )
        run.engine.before_memory_changes(gpu.sample)
    return Throughput(
        weight_sync=run.weight_sync,
        gpu=gpu,
        num_twins=run.rollouter.twins.ranks.size,
        engine_ranks=run.config.engine.tensor_parallel,
    )


def _scorer(run: Run, routing: RoutingShape | None) -> TrajectoryScorer:
    """Replays recorded experts if it is given their shape."""
    return TrajectoryScorer(
        trainer=run.policy,
        micro_batch_tokens=run.config.training.micro_batch_tokens,
        temperature=run.config.rollout.temperature,
        ranks=run.trainer.ranks,
        twins=run.rollouter.twins,
        routing=routing,
    )


def _verification(
    config: Config,
    rollouts: RankState,
    scorer: TrajectoryScorer | None,
    audit_log: AuditLog | None,
    ranks: Ranks,
) -> Verification:
    against, symmetric = config.verification.against, config.verification.symmetric
    buffer = rollouts.buffer
    return Verification(
        score=OpsScoring(scorer=scorer, against=against, symmetric=symmetric, ranks=ranks),
        filter=TrajectoryFilter(
            settings=config.filter, buffer=buffer, ledger=rollouts.ledger, ranks=ranks
        ),
        settings=config.verification,
        buffer=buffer,
        audit_log=audit_log if config.method.name == "rollverify" else None,
        ranks=ranks,
    )


def _rollouts(
    config: Config,
    model: ModelFolder,
    engine: RolloutEngine,
    prompts: list[Prompt],
    encoded: list[EncodedPrompt],
    ranks: Ranks,
    twins: Twins,
    policy: PolicyTrainer,
    reward: Reward,
) -> RankState:
    """The rollouter of this rank with all it works on, which checkpoints hold."""
    rollout, replay = config.rollout, config.routing_replay.mode
    loader = PromptLoader(
        prompts, batch_size=ranks.size, seed=config.run.seed, shuffle=config.data.shuffle
    )
    batches = encoded_batches(loader, prompts, encoded)
    queue = PromptQueue(batches=batches, prompts=encoded, ranks=ranks)
    buffer, ledger = TrajectoryBuffer(group_size=rollout.group_size), PromptLedger()
    loop = RequestLoop(
        engine=engine,
        buffer=buffer,
        prompts=encoded,
        rollout=rollout,
        stop_token_ids=model.stop_token_ids,
        run_seed=config.run.seed,
        routing=config.routing_replay.on_resume if replay == "engine" else None,
        num_graders=reward.num_threads,
        members=engine.members if isinstance(engine, SharedEngine) else Ranks(),
    )
    in_flight = rollout.oversampling * rollout.prompts_per_step * rollout.group_size
    rollouter = Rollouter(
        loop=loop,
        buffer=buffer,
        queue=queue,
        ledger=ledger,
        rollout=rollout,
        num_in_flight=math.ceil(in_flight / ranks.size),
        max_num_seqs=config.engine.max_num_seqs,
        is_on_policy=config.method.name == "on_policy",
        must_be_verified=config.method.name == "rollverify",
        ranks=ranks,
        twins=twins,
        work=work_of(policy.flops),
        dynamic_sampling=config.dynamic_sampling,
        has_signal=has_signal,
    )
    return RankState(
        loader=loader,
        buffer=buffer,
        ledger=ledger,
        queue=queue,
        rollouter=rollouter,
        rollout=rollout,
        ranks=ranks,
    )


def _policy_trainer(
    config: Config, model: ModelFolder, folder: Path, *, is_resumed: bool
) -> PolicyTrainer:
    """The sharded policy; with the model folder's weights unless a checkpoint will be loaded."""
    training = config.training
    settings = TrainerSettings(
        model_folder=str(model.path.resolve()),
        run_folder=str(folder),
        max_sequence_tokens=config.rollout.max_sequence_tokens,
        betas=(training.beta1, training.beta2),
        seed=config.run.seed,
        collective_timeout_s=math.ceil(config.parallelism.timeout_s),
        deterministic=config.run.deterministic,
        checkpoint_in_background=config.checkpoint.in_background,
        **training.model_dump(exclude={"beta1", "beta2", "minibatches", "micro_batch_tokens"}),
        **config.parallelism.model_dump(exclude={"timeout_s", "wait_timeout_s"}),
    )
    try:
        policy = build_policy_trainer(settings)
    except ModelFolderError as error:
        raise ConfigError(f"model.path: {error}") from error
    except AttentionError as error:
        raise ConfigError(str(error)) from error
    if not is_resumed:
        # An empty checkpoint folder makes torchtitan read the model folder's weights. A checkpoint
        # is left to `RunCheckpoint`, which checks it first.
        policy.checkpointer.load()
    return policy


def _weight_sync(
    config: Config, engine: RolloutEngine, policy: PolicyTrainer, vocab_size: int
) -> WeightSync:
    """The transfer from trainer to engine, with a probe of ids spread over the vocabulary."""
    # The engine scores the probe as a prompt, which must leave room for one more token.
    context = config.rollout.max_sequence_tokens
    num_probe_tokens = min(config.weight_sync.probe_tokens, context - 1)

    def trainer_score(token_ids: list[int]) -> list[float]:
        ids = torch.tensor(token_ids)
        row = PackedRow(tokens=ids[:-1], positions=torch.arange(len(ids) - 1), targets=ids[1:])
        return policy.score([row])[0].tolist()

    return WeightSync(
        engine=engine,
        parameters=lambda: policy.hf_parameters(ENGINE_DTYPES[config.engine.dtype]),
        trainer_score=trainer_score,
        probe_ids=[number % vocab_size for number in range(3, 3 + 7 * num_probe_tokens, 7)],
        parity_tolerance=config.weight_sync.parity_tolerance,
    )


def make_evaluation(
    config: Config,
    model: ModelFolder,
    engine: RolloutEngine,
    test: list[EncodedPrompt],
    ranks: Ranks,
    reward: Reward,
) -> Evaluation:
    """The pass over the test set; `ranks` deal it out."""
    evaluator = Evaluator(
        engine=engine,
        problems=test,
        settings=config.evaluation,
        reward=reward,
        decode=model.decode,
        max_response_tokens=config.rollout.max_response_tokens,
        run_seed=config.run.seed,
    )
    return Evaluation(evaluator=evaluator, ranks=ranks, last_step=config.training.steps)


def _checkpoint(
    config: Config,
    folder: Path,
    policy: PolicyTrainer,
    rollouts: RankState,
    window: AcceptanceWindow,
    evaluation: Evaluation | None,
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
        loop_state=LoopState(collect=collect, restore=restore),
        save_rank=rollouts.save,
        load_rank=rollouts.load,
        keep=config.checkpoint.keep,
        world=Ranks.patient(),
        in_background=config.checkpoint.in_background,
    )
