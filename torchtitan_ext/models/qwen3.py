"""Qwen3 for torchtitan from a config.json, dense and with experts."""

from dataclasses import dataclass

from torchtitan.config.override import derive
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.moe import MoE
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock

from torchtitan_ext.models.decoder import (
    Init,
    ScoringDecoder,
    linear_init,
    norm_config,
    outer_parts,
)
from torchtitan_ext.models.hf_config import ExpertConfig, HfConfig
from torchtitan_ext.routing_replay import ReplayRouter


class PolicyQwen3(ScoringDecoder, Qwen3Model):
    """Qwen3 whose forward scores targets."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        """The settings of `Qwen3Model`."""


def qwen3_config(config: HfConfig, chunk_mib: int) -> PolicyQwen3.Config:
    """Settings of the model; layers with and without experts differ in the feed-forward part.

    `chunk_mib` is what one chunk of float32 logits may take in the log-prob head.
    """
    experts, init = config.experts, linear_init(config)
    return PolicyQwen3.Config(
        **outer_parts(config, chunk_mib),
        layers=[
            _layer(config, init, experts if experts and i in experts.layers else None)
            for i in range(config.num_hidden_layers)
        ],
    )


def _layer(
    config: HfConfig, init: Init, experts: ExpertConfig | None
) -> Qwen3TransformerBlock.Config:
    dim, head_dim = config.hidden_size, config.head_dim
    dense = make_ffn_config(
        dim=dim,
        hidden_dim=config.intermediate_size,
        w1_param_init=init,
        w2w3_param_init=init,
    )
    return Qwen3TransformerBlock.Config(
        attention_norm=norm_config(config, dim),
        ffn_norm=norm_config(config, dim),
        attention=make_gqa_config(
            dim=dim,
            n_heads=config.num_attention_heads,
            n_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            wqkv_param_init=init,
            wo_param_init=init,
            inner_attention=VarlenAttention.Config(),
            rope=CosSinRoPE.Config(
                dim=head_dim, max_seq_len=config.max_position_embeddings, **config.rope
            ),
            qk_norm=norm_config(config, head_dim),
        ),
        feed_forward=None if experts else dense,
        moe=_moe(dim, experts, init) if experts else None,
    )


def _moe(dim: int, experts: ExpertConfig, init: Init) -> MoE.Config:
    """Softmax scores, no bias that balances the load and no shared experts, as Qwen3 has it."""
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
