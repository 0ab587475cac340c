"""Model specs for torchtitan from a Hugging Face folder: Llama, dense and mixture-of-experts Qwen3.

The model is torchtitan's own with the output projection replaced by `LogprobHead`.
"""

import warnings
from pathlib import Path
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_ext.models.hf_config import ModelFolderError, read_hf_config
from torchtitan_ext.models.llama import LlamaStateDictAdapter, llama_config
from torchtitan_ext.models.qwen3 import PolicyQwen3StateDictAdapter, qwen3_config


def model_spec_from_hf(folder: str | Path, *, chunk_mib: int = 64) -> ModelSpec:
    """The spec of a folder's config.json; ModelFolderError names folder, key and cure."""
    config = read_hf_config(folder)
    is_llama = config.model_type == "llama"
    return ModelSpec(
        name=config.model_type,
        flavor=Path(folder).name,
        model=llama_config(config, chunk_mib) if is_llama else qwen3_config(config, chunk_mib),
        parallelize_fn=parallelize_policy,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=LlamaStateDictAdapter if is_llama else PolicyQwen3StateDictAdapter,
    )


def parallelize_policy(model: nn.Module, **kwargs: Any) -> nn.Module:
    """Torchtitan's parallelisation; on gloo, gradients are summed, not pre-scaled. Collective."""
    check_expert_shards(model, kwargs["parallel_dims"])
    if isinstance(model, Llama3Model):
        model = parallelize_llama(model, **kwargs)
    else:
        assert isinstance(model, Qwen3Model)
        model = parallelize_qwen3(model, **kwargs)
    if kwargs["parallel_dims"].world_mesh.device_type == "cpu":
        # torchtitan's router asks for float32 there, which parameters in float32 have anyway.
        warnings.filterwarnings("ignore", message="In CPU autocast, but the target dtype")
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    return model


def check_expert_shards(model: nn.Module, dims: ParallelDims) -> None:
    """Refuse degrees that leave ranks with unequal parts of the experts, which cannot be loaded.

    Experts are divided among the ranks of a replica, whole ones while there are enough of them.
    """
    experts = next((m for m in model.modules() if isinstance(m, GroupedExperts)), None)
    if experts is None:
        if dims.ep > 1:
            raise ModelFolderError(f"expert parallel {dims.ep}: the model is dense, use 1")
        return
    num_experts, *sizes = experts.w1_EFD.shape
    num_ranks = dims.dp_shard * dims.cp * (dims.tp if dims.ep > 1 else 1)
    if num_experts % dims.ep or (num_ranks <= num_experts and num_experts % num_ranks):
        raise ModelFolderError(
            f"{num_experts} experts cannot be divided evenly over {num_ranks} ranks with expert "
            f"parallel {dims.ep}; choose degrees that divide {num_experts}"
        )
    if num_ranks > num_experts and any(size % (num_ranks // dims.ep) for size in sizes):
        raise ModelFolderError(
            f"one expert, {sizes[0]} x {sizes[1]}, cannot be divided evenly over "
            f"{num_ranks // dims.ep} ranks; choose degrees that divide both, or fewer ranks"
        )
