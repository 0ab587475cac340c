"""Llama for torchtitan from a config.json.

torchtitan's Llama 3 rotates neighbouring pairs of a head, and its adapter reorders the rows of the
query and key weights for that. A weight sharded over ranks cannot be reordered head by head where
the ranks do not divide its heads (9 on 2 ranks, 8 on 32), so here the halves of a head are rotated,
as Hugging Face does, and weights keep their order. The numbers are the same.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.config.override import derive
from torchtitan.models.common import ComplexRoPE, CosSinRoPE
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

from torchtitan_ext.models.decoder import ScoringDecoder, layer_parts, outer_parts
from torchtitan_ext.models.hf_config import HfConfig


class PolicyLlama(ScoringDecoder, Llama3Model):
    """Llama whose forward scores targets."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        """The settings of `Llama3Model`."""


class HalfRotationRoPE(CosSinRoPE):
    """Rotates the halves of a head by the angles of `ComplexRoPE`, which knows Llama's scaling."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """The settings of `CosSinRoPE`."""

    def _precompute_cache(self) -> Tensor:
        """[max_seq_len, 2 * dim] float32: cosine of both halves, then sine of both."""
        turns = ComplexRoPE(derive(self.config, ComplexRoPE.Config)).cache
        return torch.cat([turns.real, turns.real, turns.imag, turns.imag], dim=-1)


class LlamaStateDictAdapter(Llama3StateDictAdapter):
    """torchtitan's names, without its reordering of query and key rows."""

    def _permute(self, w: Tensor, *sizes: Any) -> Tensor:
        return w

    def _reverse_permute(self, w: Tensor, *sizes: Any) -> Tensor:
        return w

    def _validate_hf_rope_config(self, expected_rope_cls: type) -> None:
        super()._validate_hf_rope_config(HalfRotationRoPE.Config)


def llama_config(config: HfConfig, chunk_mib: int) -> PolicyLlama.Config:
    """Settings of the model; see `model_spec_from_hf`."""
    return PolicyLlama.Config(
        **outer_parts(config, chunk_mib),
        layers=[
            Llama3TransformerBlock.Config(
                **layer_parts(config, HalfRotationRoPE.Config, has_qk_norm=False)
            )
            for _ in range(config.num_hidden_layers)
        ],
    )
