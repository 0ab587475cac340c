"""Builds the single objects of a run from the config; `build.py` decides which and joins them.

Sees `Config`, like `build.py`; what it builds gets plain values.
"""

from pathlib import Path
from typing import Any

import torch

from rollverify.algorithms.switching import AcceptanceWindow
from rollverify.config.schema import Config
from rollverify.errors import ConfigError
from rollverify.inputs import ModelFolder
from rollverify.objective_parts import make_credit, make_objective
from rollverify.rank_state import RankState
from rollverify.rewards import Reward
from rollverify.rollout.engine import RolloutEngine
from rollverify.rollout.prompt_queue import EncodedPrompt
from rollverify.rollout.weight_sync import WeightSync
from rollverify.stages.evaluation import Evaluation
from rollverify.training.checkpoint import LoopState, RunCheckpoint
from rollverify.training.policy_update import PolicyUpdate
from rollverify.training.routing import RoutingShape
from torchtitan_ext.cpu_backend import install_cpu_backend

install_cpu_backend()

from torchtitan_ext.model_specs import ModelFolderError
from torchtitan_ext.packed_rows import PackedRow
from torchtitan_ext.policy_trainer import PolicyTrainer
from torchtitan_ext.reference_policy import ReferencePolicy
from torchtitan_ext.trainer_config import CHECKPOINT_FOLDER, TrainerSettings, build_policy_trainer

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
    if not is_resumed:
        # An empty checkpoint folder makes torchtitan read the model folder's weights. A checkpoint
        # is left to `RunCheckpoint`, which checks it first.
        policy.checkpointer.load()
    return policy


def make_engine(config: Config, model: ModelFolder) -> RolloutEngine:
    """The vLLM engine with the model folder's weights."""
    from rollverify.rollout.vllm_engine import VllmEngine

    engine = config.engine
    return VllmEngine(
        str(model.path),
        stop_token_id=model.stop_token_id,
        dtype=engine.dtype,
        max_model_len=config.rollout.max_sequence_tokens,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        kv_cache_gib=engine.kv_cache_gib,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        enforce_eager=engine.enforce_eager,
        seed=config.run.seed,
        num_cpu_threads=engine.num_cpu_threads,
        record_routing=config.routing_replay.mode == "engine",
        options=dict(engine.options),
    )


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
    reward: Reward,
) -> Evaluation:
    """The pass over the test set; this rank takes its share."""
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
        answer_of=(lambda token_ids: reward.answer_of(model.decode(token_ids)))
        if reward.has_answers
        else None,
        num_graders=reward.num_threads,
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
