"""Qwen3 for torchtitan from a config.json, dense and with experts."""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate
from torchtitan.config.override import derive
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.config_utils import (
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.moe import MoE
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

from torchtitan_ext.models.decoder import (
    ScoringDecoder,
    layer_parts,
    linear_init,
    outer_parts,
)
from torchtitan_ext.models.hf_config import ExpertConfig, HfConfig
from torchtitan_ext.routing_replay import ReplayRouter


class PolicyQwen3(ScoringDecoder, Qwen3Model):
    """Qwen3 whose forward scores targets."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        """The settings of `Qwen3Model`."""


class PolicyQwen3StateDictAdapter(Qwen3StateDictAdapter):
    """torchtitan's, which asks a mesh dimension of copies (HSDP) for the dimension it shards."""

    def _caculate_indices_from_placements(
        self,
        dim: int,
        dim_size: int,
        dtensor_placements: tuple[Placement, ...],
        device_mesh: DeviceMesh,
    ) -> tuple[int, int]:
        names = device_mesh.mesh_dim_names or ()
        sharding = {
            name: placement
            for name, placement in zip(names, dtensor_placements, strict=True)
            if not isinstance(placement, Replicate)
        }
        if not sharding:
            return 0, dim_size
        return super()._caculate_indices_from_placements(
            dim, dim_size, tuple(sharding.values()), device_mesh[tuple(sharding)]
        )


def qwen3_config(config: HfConfig, chunk_mib: int) -> PolicyQwen3.Config:
    """Settings of the model; see `model_spec_from_hf`."""
    return PolicyQwen3.Config(
        **outer_parts(config, chunk_mib),
        layers=[_layer(config, index) for index in range(config.num_hidden_layers)],
    )


def _layer(config: HfConfig, index: int) -> Qwen3TransformerBlock.Config:
    parts = layer_parts(config, CosSinRoPE.Config, has_qk_norm=True)
    if config.experts and index in config.experts.layers:
        parts |= {"feed_forward": None, "moe": _moe(config, config.experts)}
    return Qwen3TransformerBlock.Config(**parts)


def _moe(config: HfConfig, experts: ExpertConfig) -> MoE.Config:
    """Softmax scores, no bias that balances the load and no shared experts, as Qwen3 has it."""
    dim, init = config.hidden_size, linear_init(config)
    router = make_router_config(
        dim=dim,
        num_experts=experts.num_experts,
        gate_param_init=init,
        top_k=experts.top_k,
        score_func="softmax",
        route_norm=experts.norm_topk,
    )
    return make_moe_config(
        num_experts=experts.num_experts,
        router=derive(router, ReplayRouter.Config),
        routed_experts=make_routed_experts_config(
            dim=dim,
            hidden_dim=experts.hidden_size,
            num_experts=experts.num_experts,
            top_k=experts.top_k,
            param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), init["weight"]),
            comm_backend="standard",
        ),
        load_balance_coeff=None,
    )
