"""Model specs for torchtitan from a Hugging Face `config.json` folder: Llama, dense and MoE Qwen3.

The model is torchtitan's own with the output projection replaced by `LogprobHead`, so a forward
pass returns log-probs and entropy of given targets and never [T, V] logits. Does not read weights.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.distributed import ParallelDims
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.moe import GroupedExperts, MoE
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.parallelize import parallelize_qwen3
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_ext.config_values import shown
from torchtitan_ext.cpu.scoring_block import ScoringBlock
from torchtitan_ext.models.decoder import (
    Init,
    ScoringDecoder,
    linear_init,
    norm_config,
    outer_parts,
)
from torchtitan_ext.models.hf_config import (
    ExpertSettings,
    ModelFolderError,
    check_supported,
    expert_settings,
    read_hf_config,
    rope_theta,
)
from torchtitan_ext.models.llama import LlamaStateDictAdapter, llama_config

__all__ = ["ModelFolderError", "model_spec_from_hf", "parallelize_policy", "read_hf_config"]


class PolicyQwen3(ScoringDecoder, Qwen3Model):
    """Qwen3 whose forward scores targets."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        """The settings of `Qwen3Model`."""


class PolicyQwen3Block(ScoringBlock, Qwen3TransformerBlock):
    """Block of Qwen3 that is fast without gradient."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        """The settings of `Qwen3TransformerBlock`."""


def parallelize_policy(model: nn.Module, **kwargs: Any) -> nn.Module:
    """Torchtitan's parallelisation; on gloo, gradients are summed instead of pre-scaled.

    Raises:
        ModelFolderError: if experts cannot be divided evenly over the ranks.

    Collective: yes, over the meshes in `kwargs["parallel_dims"]`.
    """
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

    Args:
        model: not sharded yet.
        dims: degrees; experts are divided among the ranks of a replica, whole ones while there are
            enough of them.

    Raises:
        ModelFolderError: one line with the numbers.
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


def _moe(config: dict[str, Any], experts: ExpertSettings, init: Init) -> MoE.Config:
    """Softmax scores, no bias that balances the load and no shared experts, as Qwen3 has it."""
    dim, weight_init = config["hidden_size"], init["weight"]
    return make_moe_config(
        num_experts=experts.num_experts,
        router=make_router_config(
            dim=dim,
            num_experts=experts.num_experts,
            gate_param_init=init,
            top_k=experts.top_k,
            score_func="softmax",
            route_norm=experts.norm_topk,
        ),
        routed_experts=make_routed_experts_config(
            dim=dim,
            hidden_dim=experts.hidden_dim,
            num_experts=experts.num_experts,
            top_k=experts.top_k,
            param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), weight_init),
            comm_backend="standard",
        ),
        load_balance_coeff=None,
    )


def _qwen3_layer(
    config: dict[str, Any], folder: object, init: Init, experts: ExpertSettings | None
) -> PolicyQwen3Block.Config:
    dim, head_dim = config["hidden_size"], config["head_dim"]
    dense = make_ffn_config(
        dim=dim,
        hidden_dim=config["intermediate_size"],
        w1_param_init=init,
        w2w3_param_init=init,
    )
    return PolicyQwen3Block.Config(
        attention_norm=norm_config(config, dim),
        ffn_norm=norm_config(config, dim),
        attention=make_gqa_config(
            dim=dim,
            n_heads=config["num_attention_heads"],
            n_kv_heads=config["num_key_value_heads"],
            head_dim=head_dim,
            wqkv_param_init=init,
            wo_param_init=init,
            inner_attention=VarlenAttention.Config(),
            rope=CosSinRoPE.Config(
                dim=head_dim,
                max_seq_len=config["max_position_embeddings"],
                theta=rope_theta(config, folder),
            ),
            qk_norm=norm_config(config, head_dim),
        ),
        feed_forward=dense if experts is None else None,
        moe=None if experts is None else _moe(config, experts, init),
    )


def _qwen3_config(config: dict[str, Any], folder: object, chunk_mib: int) -> PolicyQwen3.Config:
    """Both architectures: they differ in the feed-forward part of the layers with experts."""
    check_supported(config, folder)
    experts = expert_settings(config, folder) if config["model_type"] == "qwen3_moe" else None
    with_experts = experts.layers if experts else frozenset[int]()
    init = linear_init(config)
    return PolicyQwen3.Config(
        **outer_parts(config, chunk_mib),
        layers=[
            _qwen3_layer(config, folder, init, experts if i in with_experts else None)
            for i in range(config["num_hidden_layers"])
        ],
    )


_BUILDERS = {
    "llama": (llama_config, LlamaStateDictAdapter),
    "qwen3": (_qwen3_config, Qwen3StateDictAdapter),
    "qwen3_moe": (_qwen3_config, Qwen3StateDictAdapter),
}


def model_spec_from_hf(folder: str | Path, *, chunk_mib: int = 64) -> ModelSpec:
    """Build the torchtitan spec of the model in a Hugging Face folder.

    Args:
        folder: holds `config.json`; weights are not read.
        chunk_mib: MiB one chunk of float32 logits may take in the log-prob head.

    Returns:
        A spec whose model is on no device yet.

    Raises:
        ModelFolderError: if the folder is missing or broken, or its `model_type` has no spec.
    """
    config = read_hf_config(folder)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _BUILDERS:
        raise ModelFolderError(
            f"'{folder}': config.json: model_type {shown(model_type)} is not supported; supported: "
            f"{', '.join(sorted(_BUILDERS))}"
        )
    build, adapter = _BUILDERS[model_type]
    return ModelSpec(
        name=model_type,
        flavor=Path(folder).name,
        model=build(config, folder, chunk_mib),
        parallelize_fn=parallelize_policy,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=adapter,
    )
