"""What the decoders of all architectures share: a forward that scores, norms, embedding, head."""

import functools
from collections.abc import Callable
from typing import Any

import torch.nn as nn
from torch import Tensor
from torchtitan.models.common import CosSinRoPE, Embedding
from torchtitan.models.common.attention import AttentionMasksType, VarlenAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init

from torchtitan_ext.logprob_head import LogprobHead
from torchtitan_ext.models.hf_config import HfConfig

Init = dict[str, Callable]
"""Initialiser by parameter name."""


class ScoringDecoder(Decoder):
    """A decoder whose forward scores targets; stands before a torchtitan model among its bases."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attention_masks: AttentionMasksType | None = None,
        *,
        targets: Tensor,
        temperature: float = 1.0,
        with_entropy: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of `targets` and entropy, [T] float32 nats each; a row is [1, T] int64 tokens.

        `positions` restart at 0 at each document; the entropy is [0] if not wanted.
        """
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden, attention_masks, positions)
        return self.lm_head(self.norm(hidden), targets, temperature, with_entropy)


def norm_config(config: HfConfig, size: int) -> RMSNorm.Config:
    """RMSNorm over `size` values."""
    return RMSNorm.Config(
        normalized_shape=size, eps=config.rms_norm_eps, param_init={"weight": nn.init.ones_}
    )


def linear_init(config: HfConfig) -> Init:
    """Normal weights of the config's `initializer_range`."""
    weight = functools.partial(nn.init.normal_, std=config.initializer_range)
    return {"weight": weight, "bias": nn.init.zeros_}


def outer_parts(config: HfConfig, chunk_mib: int) -> dict[str, Any]:
    """Sizes, last norm, embedding and head, as keywords of `Decoder.Config`."""
    vocab_size, dim = config.vocab_size, config.hidden_size
    tied = config.tie_word_embeddings
    init = linear_init(config)
    return {
        "vocab_size": vocab_size,
        "dim": dim,
        "norm": norm_config(config, dim),
        "enable_weight_tying": tied,
        "tok_embeddings": Embedding.Config(
            num_embeddings=vocab_size,
            embedding_dim=dim,
            param_init={"weight": skip_param_init if tied else init["weight"]},
        ),
        "lm_head": LogprobHead.Config(
            in_features=dim, out_features=vocab_size, param_init=init, chunk_mib=chunk_mib
        ),
    }


def layer_parts(
    config: HfConfig, rope: type[CosSinRoPE.Config], *, has_qk_norm: bool
) -> dict[str, Any]:
    """Norms, attention and feed-forward part of a dense layer, as keywords of its `Config`."""
    dim, init = config.hidden_size, linear_init(config)
    return {
        "attention_norm": norm_config(config, dim),
        "ffn_norm": norm_config(config, dim),
        "attention": make_gqa_config(
            dim=dim,
            n_heads=config.num_attention_heads,
            n_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            wqkv_param_init=init,
            wo_param_init=init,
            inner_attention=VarlenAttention.Config(),
            rope=rope(
                dim=config.head_dim, max_seq_len=config.max_position_embeddings, **config.rope
            ),
            qk_norm=norm_config(config, config.head_dim) if has_qk_norm else None,
        ),
        "feed_forward": make_ffn_config(
            dim=dim, hidden_dim=config.intermediate_size, w1_param_init=init, w2w3_param_init=init
        ),
    }
