"""Finds vLLM's CPU kernels, which compute forwards only, and says where they may be used.

The one module here that knows vLLM.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common.nn_modules import RMSNorm


@functools.cache
def engine_kernels() -> Any:
    """Operators of vLLM; None where the installed vLLM has none for CPUs."""
    try:
        from vllm import _custom_ops
    except ImportError:
        return None
    return _custom_ops if hasattr(torch.ops._C, "cpu_attention_with_kv_cache") else None


def can_use_kernels(*tensors: Tensor) -> bool:
    """Whether no gradient is recorded and all tensors are plain float32 of the CPU."""
    return (
        not torch.is_grad_enabled()
        and all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
        and not any(isinstance(t, DTensor) for t in tensors)
        and engine_kernels() is not None
    )


class KernelRMSNorm(RMSNorm):
    """`RMSNorm`, by the engine's kernel where no gradient is recorded."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        """The settings of `RMSNorm`."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x, [..., D], over its last dimension."""
        if not can_use_kernels(x, self.weight):
            return super().forward(x)
        x = x.contiguous()
        out = torch.empty_like(x)
        engine_kernels().rms_norm(out, x, self.weight, self.eps)
        return out


@functools.cache
def attends_heads_of(size: int) -> bool:
    """Whether vLLM's attention was compiled for heads of this size; False without kernels."""
    if engine_kernels() is None:
        return False
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return size in CPUAttentionBackend.get_supported_head_sizes()


@functools.cache
def instruction_set(page_tokens: int, head_size: int) -> str:
    """Name by which vLLM's attention knows the instructions that this machine has for float32."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return _get_attn_isa(torch.float32, page_tokens, head_size)
