"""What vLLM on CPUs needs so that weights can be replaced while the engine lives, and to be quick.

vLLM rearranges weights once, after loading, for its CPU kernels; what is here makes later loads
reach what the kernels read. Does not start an engine, nor decide when weights are loaded.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from rollverify.errors import ConfigError


def keep_linear_weights_unpacked() -> None:
    """Make vLLM's CPU layers read their weights at every call.

    vLLM packs linear weights once, after loading. A later in-place load would then leave the packed
    copy behind: the tied output head kept old weights without any error (log-probs off by 0.5).
    """
    from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding

    def use_plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.__dict__["cpu_linear"] = torch.nn.functional.linear

    for module in (utils, linear, vocab_parallel_embedding):
        if hasattr(module, "dispatch_cpu_unquantized_gemm"):
            module.__dict__["dispatch_cpu_unquantized_gemm"] = use_plain_linear


def leave_out_token_ranks() -> None:
    """Make vLLM's sampler give the log-prob of the chosen token alone, without its rank.

    Nobody reads the rank, and on a CPU counting it costs a few percent of a decode step. Requests
    for further tokens are served as before. May be called again.
    """
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.sample.sampler import Sampler

    original = Sampler.gather_logprobs
    if original.__module__ == __name__:
        return

    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        if num_logprobs:
            return original(logprobs, num_logprobs, token_ids)
        ids = token_ids[:, None]
        ranks = torch.zeros_like(token_ids)
        return LogprobsTensors(ids.to(torch.int32), logprobs.gather(-1, ids), ranks)

    Sampler.gather_logprobs = staticmethod(gather_logprobs)


def check_head_dim(model_folder: str, model_config: dict[str, Any]) -> None:
    """Refuse a model that vLLM's CPU attention has no kernel for.

    Args:
        model_folder: named in the error.
        model_config: contents of the folder's config.json; sizes it lacks are left to vLLM.

    Raises:
        ConfigError: naming the head sizes there are; vLLM's own message names neither key nor cure.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    try:
        head_dim = model_config.get("head_dim") or (
            model_config["hidden_size"] // model_config["num_attention_heads"]
        )
    except (KeyError, TypeError, ZeroDivisionError):
        return  # vLLM's own error is clear for such a config.json.
    supported = CPUAttentionBackend.get_supported_head_sizes()
    if head_dim not in supported:
        raise ConfigError(
            f"'{model_folder}' has head_dim {head_dim}; on CPUs vLLM supports "
            f"{', '.join(map(str, supported))}; use a model with one of them or a GPU"
        )


def load_experts_packed(model: torch.nn.Module) -> int:
    """Make every later load of expert weights write the layout that vLLM's CPU kernel reads.

    The kernel reads expert weights in blocks of output rows, packed once after the first load in
    place of the plain ones. vLLM's own loader knows nothing of it: a second load would write plain
    rows over packed blocks, without any error. No second copy of the experts is kept.

    Args:
        model: vLLM's model, its weights loaded.

    Returns:
        Layers whose loaders were replaced; 0 for a model without experts and where vLLM kept its
        expert weights plain.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    replaced = 0
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if not isinstance(experts, CPUUnquantizedExperts) or experts._use_zentorch:
            continue
        size = experts.moe_config.intermediate_size_per_partition
        for name in ("w13_weight", "w2_weight"):
            parameter: Any = layer.get_parameter(name)
            parameter.weight_loader = functools.partial(_load_packed, isa=experts.isa, size=size)
        replaced += 1
    return replaced


def _load_packed(
    param: Tensor,
    loaded_weight: Tensor,
    weight_name: str,
    shard_id: str,
    expert_id: int,
    return_success: bool = False,
    *,
    isa: str,
    size: int,
) -> bool | None:
    """Write one projection of one expert; named and called as vLLM's `weight_loader` is.

    Args:
        param: [experts, 2 * padded, hidden] for w1 (gate) and w3 (up), [experts, hidden, padded]
            for w2 (down), packed; `padded` is `size` rounded up for the kernel.
        loaded_weight: [size, hidden], for w2 [hidden, size].
        weight_name: vLLM's name, for errors.
        shard_id: "w1", "w2" or "w3".
        expert_id: the expert.
        return_success: whether the caller wants to know that it was written.
        isa: instruction set whose layout is packed.
        size: the experts' size in the model.

    Raises:
        ValueError: if the weight has another shape than the engine's.
    """
    packed = param.data[expert_id].view(-1)
    if shard_id == "w2":
        hidden, padded = param.shape[1:]
        shape, padding = (hidden, size), (0, padded - size)
    else:
        rows, hidden = param.shape[1:]
        padded = rows // 2
        shape, padding = (size, hidden), (0, 0, 0, padded - size)
        packed = packed.view(2, -1)[0 if shard_id == "w1" else 1]
    if loaded_weight.shape != shape:
        raise ValueError(
            f"'{weight_name}', expert {expert_id}, {shard_id}: got shape "
            f"{list(loaded_weight.shape)}, the engine has {list(shape)}"
        )
    plain = torch.nn.functional.pad(loaded_weight.to(param.dtype), padding).contiguous()
    from vllm._custom_ops import cpu_prepack_moe_weight

    # Rows are packed in blocks of 32, so that gate and up, each of whole blocks, pack on their own.
    packed.copy_(cpu_prepack_moe_weight(plain[None], isa).view(-1))
    return True if return_success else None
