"""Builds a `PolicyTrainer` from plain values; callers see none of torchtitan's config objects."""

import warnings
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.optimizer.optimizer import ParamGroupConfig
from torchtitan.config.configs import (
    CommConfig,
    CompileConfig,
    DebugConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools import utils

from torchtitan_ext.cpu.modules import use_cpu_modules, use_float32_modules
from torchtitan_ext.flash_attention import use_flash_attention
from torchtitan_ext.models.specs import model_spec_from_hf
from torchtitan_ext.policy_trainer import PolicyTrainer
from torchtitan_ext.process_group import init_process_group

CHECKPOINT_FOLDER = "checkpoints"

_ACTIVATION_CHECKPOINT = {"none": None, "selective": SelectiveAC, "full": FullAC}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings:
    """What a policy trainer needs to know."""

    model_folder: str  # Hugging Face folder with config.json and safetensors
    run_folder: str  # checkpoints go below it
    load_weights: bool = True  # False starts from random weights
    steps: int  # optimizer steps of the whole run, for the schedule
    max_sequence_tokens: int  # longest prompt plus response
    lr: float
    weight_decay: float = 0.0
    betas: tuple[float, float]
    eps: float = 1e-8
    warmup_steps: int = 0
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"
    max_grad_norm: float = 1.0
    dtype: Literal["float32", "bfloat16"] = "float32"  # of computation; parameters stay float32
    logprob_chunk_mib: int = 0  # 0: 64 on CPUs, 512 on GPUs
    activation_checkpoint: Literal["none", "selective", "full"] = "none"
    attention: Literal["auto", "FA2", "FA3", "FA4"] = "auto"  # on GPUs in bfloat16
    compile: bool = False  # each block, on GPUs
    offload_optimizer: bool = False  # its state is in main memory but for its step
    deterministic: bool = False  # on GPUs, where torch has such kernels
    seed: int = 0
    data_parallel_replicate: int = 1
    data_parallel_shard: int = -1
    tensor_parallel: int = 1
    expert_parallel: int = 1
    checkpoint_in_background: bool = False  # beside the next steps, from a copy
    collective_timeout_s: int = 600  # a rank that waits longer for the others fails


def build_policy_trainer(settings: TrainerSettings) -> PolicyTrainer:
    """Build the sharded trainer, at step 0; its checkpointer reads the weights. Collective.

    ModelFolderError for a folder without a supported model, ValueError for degrees that do not fit.
    """
    if settings.tensor_parallel > 1 and settings.expert_parallel > 1:
        raise ValueError(
            f"tensor_parallel {settings.tensor_parallel} with expert_parallel "
            f"{settings.expert_parallel}: torchtitan would split a row's tokens over the ranks, "
            "which needs sequence parallelism; set one of them to 1"
        )
    init_process_group(settings.collective_timeout_s)
    # torchtitan restores the schedule through torch's get_lr, which warns outside of a step.
    warnings.filterwarnings("ignore", message="To get the last learning rate")
    names = ("lr", "weight_decay", "betas", "eps")
    kwargs = {name: getattr(settings, name) for name in names}
    adamw = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=kwargs)
    decay: dict[str, Any] = {"decay_type": settings.lr_decay}
    if settings.lr_decay == "constant":
        decay = {"decay_ratio": 0.0}
    activation_checkpoint = _ACTIVATION_CHECKPOINT[settings.activation_checkpoint]
    config = PolicyTrainer.Config(
        model_spec=_model_spec(settings),
        hf_assets_path=settings.model_folder,
        dump_folder=settings.run_folder,
        offload_optimizer=settings.offload_optimizer,
        optimizer=OptimizersContainer.Config(param_groups=[adamw], implementation="fused"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=settings.warmup_steps, **decay),
        training=TrainingConfig(
            seq_len=settings.max_sequence_tokens,
            steps=settings.steps,
            max_norm=settings.max_grad_norm,
            mixed_precision_param=settings.dtype,
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor",
            data_parallel_replicate_degree=settings.data_parallel_replicate,
            data_parallel_shard_degree=settings.data_parallel_shard,
            tensor_parallel_degree=settings.tensor_parallel,
            expert_parallel_degree=settings.expert_parallel,
            enable_sequence_parallel=False,
        ),
        checkpoint=_checkpoint_config(settings),
        compile=CompileConfig(
            enable=settings.compile and utils.device_type != "cpu", components=["model"]
        ),
        metrics=MetricsProcessor.Config(enable_tensorboard=False, log_freq=10**9),
        comm=CommConfig(init_timeout_seconds=settings.collective_timeout_s, trace_buf_size=0),
        activation_checkpoint=activation_checkpoint.Config() if activation_checkpoint else None,
        debug=DebugConfig(
            seed=settings.seed,
            deterministic=settings.deterministic and utils.device_type != "cpu",
            deterministic_warn_only=True,  # the head's scatter never meets an index twice
            enable_structured_logging=False,
        ),
    )
    return PolicyTrainer(config)


def _model_spec(settings: TrainerSettings) -> ModelSpec:
    """The model with the modules that suit device and type."""
    on_cpu = utils.device_type == "cpu"
    chunk_mib = settings.logprob_chunk_mib or (64 if on_cpu else 512)
    spec = model_spec_from_hf(settings.model_folder, chunk_mib=chunk_mib)
    if on_cpu:
        use_cpu_modules(spec.model)
    elif settings.dtype == "float32":
        use_float32_modules(spec.model)
    else:
        use_flash_attention(settings.attention)
    return spec


def _checkpoint_config(settings: TrainerSettings) -> CheckpointManager.Config:
    """Checkpoints that are saved and deleted by the caller; the first weights are the folder's."""
    return CheckpointManager.Config(
        enable=True,
        folder=CHECKPOINT_FOLDER,
        interval=1,
        keep_latest_k=0,
        initial_load_path=settings.model_folder if settings.load_weights else None,
        initial_load_in_hf=settings.load_weights,
        initial_load_model_only=settings.load_weights,
        last_save_model_only=False,
        async_mode="async" if settings.checkpoint_in_background else "disabled",
    )
