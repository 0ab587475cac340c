"""Llama models for torchtitan from a Hugging Face config.json: sizes, rotary embedding, names.

torchtitan's Llama 3 rotates neighbouring pairs of a head, and its adapter reorders the rows of the
query and key weights for that. A weight sharded over ranks cannot be reordered head by head where
the ranks do not divide its heads (9 on 2 ranks, 8 on 32), so here the halves of a head are rotated,
as Hugging Face does, and weights keep their order. The numbers are the same. Reads no weights.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.models.common import ComplexRoPE, CosSinRoPE
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

from torchtitan_ext.cpu.scoring_block import ScoringBlock
from torchtitan_ext.models.decoder import (
    Init,
    ScoringDecoder,
    linear_init,
    norm_config,
    outer_parts,
)
from torchtitan_ext.models.hf_config import check_supported, llama_rope, with_llama_defaults


class PolicyLlama(ScoringDecoder, Llama3Model):
    """Llama whose forward scores targets."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        """The settings of `Llama3Model`."""


class PolicyLlamaBlock(ScoringBlock, Llama3TransformerBlock):
    """Block of Llama that is fast without gradient."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3TransformerBlock.Config):
        """The settings of `Llama3TransformerBlock`."""


class HalfRotationRoPE(CosSinRoPE):
    """Rotates the halves of a head by the angles of `ComplexRoPE`, which knows Llama's scaling."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """The settings of `CosSinRoPE`."""

    def _precompute_cache(self) -> Tensor:
        """[max_seq_len, 2 * dim] float32: cosine of both halves, then sine of both."""
        config = self.config
        turns = ComplexRoPE(
            ComplexRoPE.Config(
                dim=config.dim,
                max_seq_len=config.max_seq_len,
                theta=config.theta,
                scaling=config.scaling,
                scaling_factor=config.scaling_factor,
                low_freq_factor=config.low_freq_factor,
                high_freq_factor=config.high_freq_factor,
                original_max_position_embeddings=config.original_max_position_embeddings,
            )
        ).cache
        return torch.cat([turns.real, turns.real, turns.imag, turns.imag], dim=-1)


class LlamaStateDictAdapter(Llama3StateDictAdapter):
    """torchtitan's names, without its reordering of query and key rows."""

    def _permute(
        self, w: Tensor, n_heads_arg: int, dim1: int | None = None, dim2: int | None = None
    ) -> Tensor:
        return w

    def _reverse_permute(
        self, w: Tensor, n_heads_arg: int, dim1: int | None = None, dim2: int | None = None
    ) -> Tensor:
        return w

    def _validate_hf_rope_config(self, expected_rope_cls: type) -> None:
        super()._validate_hf_rope_config(HalfRotationRoPE.Config)


def _layer(config: dict[str, Any], folder: object, init: Init) -> PolicyLlamaBlock.Config:
    dim = config["hidden_size"]
    return PolicyLlamaBlock.Config(
        attention_norm=norm_config(config, dim),
        ffn_norm=norm_config(config, dim),
        attention=make_gqa_config(
            dim=dim,
            n_heads=config["num_attention_heads"],
            n_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            wqkv_param_init=init,
            wo_param_init=init,
            inner_attention=VarlenAttention.Config(),
            rope=HalfRotationRoPE.Config(
                dim=config["head_dim"],
                max_seq_len=config["max_position_embeddings"],
                **llama_rope(config, folder),
            ),
        ),
        feed_forward=make_ffn_config(
            dim=dim,
            hidden_dim=config["intermediate_size"],
            w1_param_init=init,
            w2w3_param_init=init,
        ),
    )


def llama_config(config: dict[str, Any], folder: object, chunk_mib: int) -> PolicyLlama.Config:
    """Settings of the model that a config.json with `model_type` "llama" describes.

    Args:
        config: contents of config.json.
        folder: named in errors.
        chunk_mib: MiB one chunk of float32 logits may take in the log-prob head.

    Raises:
        ModelFolderError: one line that names the folder and the key.
    """
    config = with_llama_defaults(config, folder)
    check_supported(config, folder)
    init = linear_init(config)
    return PolicyLlama.Config(
        **outer_parts(config, chunk_mib),
        layers=[_layer(config, folder, init) for _ in range(config["num_hidden_layers"])],
    )
