"""What the decoders of every architecture share: a forward that scores, norms, embedding and head.

Layers, names of weights and the keys of config.json are left to the spec of an architecture.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torchtitan.models.common import Embedding
from torchtitan.models.common.attention import AttentionMasksType
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init

from torchtitan_ext.cpu.kernels import can_use_kernels, engine_kernels
from torchtitan_ext.logprob_head import LogprobHead

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
        """Score one packed row.

        Args:
            tokens: [1, T] int64, documents laid end to end.
            positions: [1, T] int64, restarting at 0 at each document.
            attention_masks: document boundaries, from `get_attention_masks`.
            targets: [1, T] int64; token whose log-prob is wanted at each position.
            temperature: > 0.
            with_entropy: whether the entropy is wanted.

        Returns:
            (log-probs [T] float32 nats; entropy [T] float32 nats, or [0] if not wanted).
        """
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden, attention_masks, positions)
        return self.lm_head(self.norm(hidden), targets, temperature, with_entropy)

    def score_gathered(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attention_masks: AttentionMasksType | None = None,
        *,
        targets: Tensor,
        temperature: float = 1.0,
    ) -> Tensor:
        """Score one packed row past the hooks of FSDP: all weights must be gathered already.

        Args:
            tokens: as in `forward`.
            positions: as in `forward`.
            attention_masks: as in `forward`.
            targets: as in `forward`.
            temperature: > 0.

        Returns:
            [T] float32 nats.
        """
        hidden = self.tok_embeddings.forward(tokens)
        for layer in self.layers.values():
            hidden = layer.forward(hidden, attention_masks, positions)
        normed = self.norm.forward(hidden)
        return self.lm_head.forward(normed, targets, temperature, with_entropy=False)[0]


class PolicyRMSNorm(RMSNorm):
    """`RMSNorm`, by the engine's kernel where no gradient is recorded on a CPU."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        """The settings of `RMSNorm`."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise over the last dimension.

        Args:
            x: [..., D].

        Returns:
            [..., D], dtype of x.
        """
        if not can_use_kernels(x, self.weight):
            return super().forward(x)
        kernels = engine_kernels()
        assert kernels is not None and self.eps is not None
        x = x.contiguous()
        out = torch.empty_like(x)
        kernels.rms_norm(out, x, self.weight, self.eps)
        return out


def norm_config(config: dict[str, Any], size: int) -> PolicyRMSNorm.Config:
    """RMSNorm over `size` values with the epsilon of the config.json."""
    return PolicyRMSNorm.Config(
        normalized_shape=size,
        eps=config["rms_norm_eps"],
        param_init={"weight": nn.init.ones_},
    )


def linear_init(config: dict[str, Any]) -> Init:
    """Normal weights of the config.json's `initializer_range` (0.02 where it has none)."""
    weight = functools.partial(nn.init.normal_, std=config.get("initializer_range", 0.02))
    return {"weight": weight, "bias": nn.init.zeros_}


def outer_parts(config: dict[str, Any], chunk_mib: int) -> dict[str, Any]:
    """Settings of a torchtitan decoder outside its layers.

    Args:
        config: contents of config.json that passed `check_supported`.
        chunk_mib: MiB one chunk of float32 logits may take in the log-prob head.

    Returns:
        Sizes, last norm, embedding and head, as keywords of `Decoder.Config`.
    """
    vocab_size, dim = config["vocab_size"], config["hidden_size"]
    tied = bool(config.get("tie_word_embeddings", False))
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
