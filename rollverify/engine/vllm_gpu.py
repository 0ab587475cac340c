"""What vLLM on GPUs needs beside a trainer in the same process: its device, its share of memory."""

import math
from typing import Any

import torch
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from rollverify.config.tables import EngineConfig
from rollverify.engine.memory import GIB, engine_share
from rollverify.errors import ConfigError
from torchtitan_ext.models.hf_config import ModelFolderError
from torchtitan_ext.models.meta import stored_shapes


class TrainerDeviceExecutor(UniProcExecutor):
    """Runs the model in this process on the GPU that the trainer has made current.

    vLLM would take the first one, on every rank, and make it current for the trainer too.
    """

    def _distributed_args(self) -> tuple[str, int, int]:
        method, rank, _ = super()._distributed_args()
        return method, rank, torch.cuda.current_device()


def gpu_arguments(
    model_folder: str, settings: EngineConfig, *, has_experts: bool, reserved: int = 0
) -> dict[str, Any]:
    """Engine arguments for a GPU; ConfigError if what is free cannot hold weights and cache.

    `reserved` bytes of it are the trainer's: its optimizer has its state only after a step.
    """
    torch.cuda.empty_cache()  # what the trainer has given up counts as taken until then
    free, total = torch.cuda.mem_get_info()
    free -= reserved
    share = settings.gpu_memory_utilization or engine_share(free, total, settings.sleep)
    check_share(model_folder, settings, share=share, free=free, total=total)
    arguments: dict[str, Any] = {
        "distributed_executor_backend": TrainerDeviceExecutor,
        "enable_sleep_mode": settings.sleep,
        "gpu_memory_utilization": share,
        # Logits in bfloat16 would round log-probs of likely tokens to steps of 0.125 nats.
        "hf_overrides": {"head_dtype": "float32"},
    }
    if has_experts:
        # Other kernels rearrange the experts after the first load; a second would not.
        arguments["moe_backend"] = "triton"
    return arguments


def check_share(
    model_folder: str, settings: EngineConfig, *, share: float, free: int, total: int
) -> None:
    """Refuse a share that is not free or does not hold the weights; bytes. Before they are read."""
    device = torch.cuda.current_device()
    what = f"GPU {device} has {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    needed = weight_bytes(model_folder, settings.dtype) // settings.tensor_parallel
    if share * total > free:
        raise ConfigError(
            f"{what}, engine.gpu_memory_utilization = {share:.2f} asks for "
            f"{share * total / GIB:.1f}; lower it, end other processes on this GPU, or use more "
            "GPUs for the trainer"
        )
    if share * total <= needed:
        raise ConfigError(
            f"{what} and the engine may take {share * total / GIB:.1f}, but its weights alone are "
            f"{needed / GIB:.1f}; raise engine.gpu_memory_utilization, set engine.sleep = true and "
            "training.offload_optimizer = true, or use more GPUs for the trainer"
        )


def weight_bytes(model_folder: str, dtype: str) -> int:
    """Bytes of a folder's weights in the engine's type."""
    try:
        shapes = stored_shapes(model_folder)
    except ModelFolderError as error:
        raise ConfigError(f"model.path: {error}") from error
    return sum(map(math.prod, shapes.values())) * (4 if dtype == "float32" else 2)


def check_device(model: torch.nn.Module, device: int) -> None:
    """Refuse an engine that is on another GPU than the trainer, or has made another one current."""
    places = {parameter.device.index for parameter in model.parameters()}
    if places != {device} or torch.cuda.current_device() != device:
        raise ConfigError(
            f"the trainer is on GPU {device}, but the engine's weights are on {sorted(places)} and "
            f"GPU {torch.cuda.current_device()} is current; start one rank per GPU with torchrun"
        )
