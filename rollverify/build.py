"""Composition root: turns a config into the objects of a run, and lists its hooks.

The only place that sees `Config` and everything else at once. Sub-configs leave it as plain values.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rollverify import run_folder
from rollverify.config.check import check_world_size
from rollverify.config.dump import to_json
from rollverify.config.schema import Config
from rollverify.data.loader import PromptLoader
from rollverify.errors import ConfigError
from rollverify.hooks import HookPoint, HookRegistry
from rollverify.inputs import ModelFolder, encoded_batches, load_encoded, read_model_folder
from rollverify.metrics.recorder import Recorder
from rollverify.prepare import TEST_FILE, TRAIN_FILE, base_folder, is_prepared
from rollverify.report import final_report
from rollverify.rewards import REWARDS
from rollverify.rollout.on_policy import EncodedPrompt, OnPolicyRollouter
from rollverify.rollout.weight_sync import WeightSync
from rollverify.shutdown import StopRequest
from rollverify.stages.checkpointing import Checkpointing
from rollverify.stages.evaluation import Evaluation
from rollverify.stages.rollout_metrics import RolloutMetrics
from rollverify.stages.throughput import Throughput
from rollverify.state import StepState
from rollverify.training.checkpoint import LoopState, RunCheckpoint
from rollverify.training.policy_update import PolicyUpdate
from torchtitan_ext.cpu_backend import install_cpu_backend
from torchtitan_ext.process_group import init_process_group

install_cpu_backend()

from torchtitan_ext.hf_folder import write_hf_folder
from torchtitan_ext.model_specs import ModelFolderError
from torchtitan_ext.policy_trainer import PackedRow, PolicyTrainer
from torchtitan_ext.trainer_config import CHECKPOINT_FOLDER, TrainerSettings, build_policy_trainer

logger = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT_S = 600.0


@dataclass(kw_only=True)
class Run:
    """The objects of one run, on one rank."""

    config: Config
    folder: Path
    rank: int
    model_folder: ModelFolder
    policy: PolicyTrainer
    rollouter: OnPolicyRollouter
    trainer: PolicyUpdate
    weight_sync: WeightSync
    hooks: HookRegistry
    recorder: Recorder
    evaluation: Evaluation | None
    checkpoint: RunCheckpoint
    checkpointing: Checkpointing
    engine: Any
    stop: StopRequest
    first_step: int = 1

    def start(self) -> None:
        """Bring the engine to the trainer's weights and measure the base model.

        Collective: yes, over the world.
        """
        self.hooks.log_order()
        self.recorder.log_config(to_json(self.config))
        self.weight_sync.push(self.first_step - 1)
        if self.evaluation is not None and not self.evaluation.results:
            state = StepState(step=0, policy_version=0)
            state.metrics |= self.evaluation.run(0)
            self.recorder.log(state)

    def steps(self) -> Iterator[int]:
        """Steps that are left, until one rank was asked to stop. Collective: yes, per step."""
        for step in range(self.first_step, self.config.training.steps + 1):
            if self._stop_agreed():
                logger.info("stopping before step %d", step)
                break
            yield step
            self.policy.step = step

    def _stop_agreed(self) -> bool:
        requested = torch.tensor(int(self.stop.requested), device=self.policy.device)
        dist.all_reduce(requested, op=dist.ReduceOp.MAX)
        return bool(requested.item())

    def finish(self) -> int:
        """Save what was asked for, export, print the table; return the exit code.

        Collective: yes, over the world.
        """
        done = self.policy.step
        if done < self.config.training.steps:
            if self.config.checkpoint.save_on_interrupt and done > 0:
                self.checkpointing.save(done)
            self.stop.done()
            logger.info("stopped after step %d; go on with --resume %s", done, self.folder)
            return self.stop.exit_code
        if self.config.checkpoint.export_final:
            write_hf_folder(
                self.folder / "model",
                self.policy.hf_parameters(),
                source=self.model_folder.path,
                is_writer=self.rank == 0,
            )
        self.stop.done()
        if self.rank == 0:
            final_report(self.folder, self.evaluation.results if self.evaluation else {})
        return 0

    def close(self) -> None:
        """Release engine, files and process group."""
        self.recorder.close()
        self.engine.close()
        self.policy.close()
        if dist.is_initialized():
            dist.destroy_process_group()


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
    prompts, encoded = _prompts(config, model, config.data.train_file, TRAIN_FILE)
    test = _prompts(config, model, config.data.test_file, TEST_FILE)[1] if config.evaluation.enable else []
    rank, world_size = init_process_group(COLLECTIVE_TIMEOUT_S)
    check_world_size(config, world_size)
    folder = _shared_folder(config, resumed, rank)
    policy = _policy_trainer(config, model, folder)
    engine = _engine(config, model)
    loader = PromptLoader(
        prompts,
        prompts_per_step=config.rollout.prompts_per_step,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
    )
    rollouter = OnPolicyRollouter(
        engine=engine,
        batches=encoded_batches(loader, prompts, encoded),
        group_size=config.rollout.group_size,
        max_response_tokens=config.rollout.max_response_tokens,
        temperature=config.rollout.temperature,
        max_num_seqs=config.engine.max_num_seqs,
        run_seed=config.run.seed,
        data_rank=policy.data_rank,
        data_world_size=policy.data_world_size,
    )
    evaluation = _evaluation(config, engine, test, policy) if config.evaluation.enable else None
    checkpoint = _checkpoint(config, folder, policy, loader, rollouter, evaluation, rank)
    first_step = checkpoint.load_latest() + 1 if resumed is not None else 1
    recorder = Recorder(
        folder,
        rank=rank,
        world_size=world_size,
        total_steps=config.training.steps,
        tensorboard=config.metrics.tensorboard,
        progress=True,
        resume_step=first_step - 1,
    )
    weight_sync = WeightSync(
        engine=engine,
        parameters=policy.hf_parameters,
        trainer_score=_Scorer(policy),
        probe_ids=[i % model.vocab_size for i in range(3, 3 + 7 * config.weight_sync.probe_tokens, 7)],
        parity_tolerance=config.weight_sync.parity_tolerance,
    )
    checkpointing = Checkpointing(
        save=checkpoint.save,
        every_steps=config.checkpoint.every_steps,
        last_step=config.training.steps,
    )
    return Run(
        config=config,
        folder=folder,
        rank=rank,
        model_folder=model,
        policy=policy,
        rollouter=rollouter,
        trainer=_policy_update(config, policy),
        weight_sync=weight_sync,
        hooks=build_hooks(
            config, model, recorder, rollouter, loader, weight_sync, evaluation, checkpointing
        ),
        recorder=recorder,
        evaluation=evaluation,
        checkpoint=checkpoint,
        checkpointing=checkpointing,
        engine=engine,
        stop=StopRequest(),
        first_step=first_step,
    )


def build_hooks(
    config: Config,
    model: ModelFolder,
    recorder: Recorder,
    rollouter: OnPolicyRollouter,
    loader: PromptLoader,
    weight_sync: WeightSync,
    evaluation: Evaluation | None,
    checkpointing: Checkpointing,
) -> HookRegistry:
    """Register every hook; the order here is the order they run in."""
    hooks = HookRegistry()
    hooks.register(
        HookPoint.AFTER_ROLLOUT,
        "rollout_metrics",
        RolloutMetrics(
            rollouter=rollouter,
            decode=model.decode,
            log_text=recorder.log_text,
            text_samples=config.metrics.text_samples,
            text_samples_every=config.metrics.text_samples_every,
            epoch=lambda: loader.last_batch_epoch,
        ),
    )
    hooks.register(
        HookPoint.AFTER_WEIGHT_SYNC,
        "throughput",
        Throughput(weight_sync=weight_sync, num_prompts=lambda: loader.num_drawn),
    )
    if evaluation is not None:
        hooks.register(HookPoint.AFTER_WEIGHT_SYNC, "evaluation", evaluation)
    hooks.register(HookPoint.AFTER_WEIGHT_SYNC, "checkpointing", checkpointing)
    return hooks


class _Scorer:
    """Log-probs of a token sequence by the trainer at temperature 1."""

    def __init__(self, policy: PolicyTrainer) -> None:
        self._policy = policy

    def __call__(self, token_ids: list[int]) -> list[float]:
        ids = torch.tensor(token_ids)
        row = PackedRow(
            tokens=ids[:-1], positions=torch.arange(len(ids) - 1), targets=ids[1:]
        )
        return self._policy.score([row])[0].tolist()


def _model_folder(config: Config) -> ModelFolder:
    max_tokens = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    if config.model.path:
        return read_model_folder(Path(config.model.path), max_tokens)
    if not is_prepared(config.prepare):
        raise ConfigError(
            "the base model is not prepared; run `python -m rollverify.prepare` with the same "
            "flags first (./run_train.sh does), or set model.path"
        )
    return read_model_folder(base_folder(config.prepare), max_tokens)


def _prompts(
    config: Config, model: ModelFolder, file: str, prepared_file: str
) -> tuple[list[Any], list[EncodedPrompt]]:
    path = Path(file) if file else base_folder(config.prepare) / prepared_file
    reward = REWARDS[config.data.reward]
    return load_encoded(path, model, config.rollout.max_prompt_tokens, reward)


def _shared_folder(config: Config, resumed: Path | None, rank: int) -> Path:
    """Rank 0 makes the run folder (or its error) and the others learn of it. Collective."""
    box: list[Any] = [None]
    if rank == 0:
        try:
            folder = resumed or run_folder.create(config)
            run_folder.write_config(folder, config)
            box[0] = str(folder)
        except ConfigError as error:
            box[0] = error
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], ConfigError):
        raise box[0]
    return Path(box[0])


def _policy_trainer(config: Config, model: ModelFolder, folder: Path) -> PolicyTrainer:
    training, parallelism = config.training, config.parallelism
    settings = TrainerSettings(
        model_folder=str(model.path.resolve()),
        run_folder=str(folder),
        steps=training.steps,
        max_sequence_tokens=config.rollout.max_prompt_tokens + config.rollout.max_response_tokens,
        lr=training.lr,
        weight_decay=training.weight_decay,
        beta1=training.beta1,
        beta2=training.beta2,
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
    # An empty checkpoint folder makes torchtitan read the model folder's weights.
    policy.checkpointer.load()
    return policy


def _engine(config: Config, model: ModelFolder) -> Any:
    from rollverify.rollout.vllm_engine import VllmEngine

    engine = config.engine
    return VllmEngine(
        str(model.path),
        stop_token_id=model.stop_token_id,
        dtype=engine.dtype,
        max_model_len=config.rollout.max_prompt_tokens + config.rollout.max_response_tokens,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        kv_cache_gib=engine.kv_cache_gib,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        enforce_eager=engine.enforce_eager,
        seed=config.run.seed,
        options=dict(engine.options),
    )


def _policy_update(config: Config, policy: PolicyTrainer) -> PolicyUpdate:
    correction = config.correction
    return PolicyUpdate(
        trainer=policy,
        micro_batch_tokens=config.training.micro_batch_tokens,
        temperature=config.rollout.temperature,
        clip_low=config.loss.clip_low,
        clip_high=config.loss.clip_high,
        truncation_threshold=correction.threshold if correction.name == "truncated" else None,
        aggregation=config.loss.aggregation,
        constant_length=config.rollout.max_response_tokens,
        advantage_std=config.advantage.std,
        data_group=policy.data_group,
    )


def _evaluation(
    config: Config, engine: Any, test: list[EncodedPrompt], policy: PolicyTrainer
) -> Evaluation:
    return Evaluation(
        engine=engine,
        prompts=test[: config.evaluation.num_problems],
        samples_per_problem=config.evaluation.samples_per_problem,
        temperature=config.evaluation.temperature,
        max_response_tokens=config.rollout.max_response_tokens,
        max_num_seqs=config.engine.max_num_seqs,
        run_seed=config.run.seed,
        every_steps=config.evaluation.every_steps,
        last_step=config.training.steps,
        data_rank=policy.data_rank,
        data_world_size=policy.data_world_size,
    )


def _checkpoint(
    config: Config,
    folder: Path,
    policy: PolicyTrainer,
    loader: PromptLoader,
    rollouter: OnPolicyRollouter,
    evaluation: Evaluation | None,
    rank: int,
) -> RunCheckpoint:
    def collect() -> dict[str, Any]:
        return {
            "loader": loader.state_dict(),
            "num_groups_drawn": rollouter.num_groups_drawn,
            "evaluation": evaluation.results if evaluation is not None else {},
        }

    def restore(values: dict[str, Any]) -> None:
        loader.load_state_dict(values["loader"])
        rollouter.num_groups_drawn = values["num_groups_drawn"]
        if evaluation is not None:
            evaluation.results = {int(step): m for step, m in values["evaluation"].items()}

    return RunCheckpoint(
        folder=folder / CHECKPOINT_FOLDER,
        checkpointer=policy.checkpointer,
        model_shapes=lambda: {k: tuple(v.shape) for k, v in policy.model.state_dict().items()},
        loop_state=LoopState(collect, restore),
        keep=config.checkpoint.keep,
        rank=rank,
    )
