"""Finds vLLM's CPU kernels and says where they may stand in for torchtitan's operations.

They compute forwards only. The one module here that knows vLLM.
"""

import functools
from types import ModuleType

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@functools.cache
def engine_kernels() -> ModuleType | None:
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
