"""What vLLM on CPUs needs so that weights can be replaced while the engine lives, and to be quick.

vLLM rearranges weights once, after loading, for its CPU kernels; what is here makes later loads
reach what the kernels read.
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rollverify.config.tables import EngineConfig
from rollverify.errors import ConfigError


def cpu_arguments(settings: EngineConfig, max_model_len: int) -> dict[str, Any]:
    """Engine arguments for a CPU."""
    return {
        # A prompt split over two steps makes vLLM rewind the request's generator, which torch
        # cannot do on CPUs ("CPU Generator does not use offset").
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(settings.max_num_batched_tokens, max_model_len),
        "kv_cache_memory_bytes": int(settings.kv_cache_gib * 2**30),
    }


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
    """Spare vLLM's sampler the rank of the chosen token, a few percent of a decode step."""
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
    """Refuse a model that vLLM's CPU attention has no kernel for; vLLM's message names no cure."""
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

    The kernel reads blocks of output rows, packed once after the first load in place of the plain
    ones; vLLM's own loader would write plain rows over them, without any error. Returns the layers
    changed: 0 without experts and where vLLM kept them plain.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    replaced = 0
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if not isinstance(experts, CPUUnquantizedExperts) or experts._use_zentorch:
            continue
        config = experts.moe_config
        size = config.intermediate_size_per_partition
        load = functools.partial(
            _load_packed, isa=experts.isa, size=size, member=(config.tp_rank, config.tp_size)
        )
        for name in ("w13_weight", "w2_weight"):
            parameter: Any = layer.get_parameter(name)
            parameter.weight_loader = load
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
    member: tuple[int, int] = (0, 1),
) -> bool | None:
    """Write one projection of one expert; named and called as vLLM's `weight_loader` is.

    param: [experts, 2 * padded, hidden] for w1 (gate) and w3 (up), [experts, hidden, padded] for w2
    (down), packed; `padded` is `size` rounded up for the kernel.
    loaded_weight: [size, hidden], for w2 [hidden, size]; in an engine over several ranks as many
    times `size`, of which this `member` (rank, number) holds its own.
    """
    dim, (rank, num_members) = 1 if shard_id == "w2" else 0, member
    if loaded_weight.shape[dim] == size * num_members:
        loaded_weight = loaded_weight.narrow(dim, rank * size, size)
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


def list_blocks_of_prompts_only(scheduler: Any) -> None:
    """Make vLLM's scheduler list the blocks of requests without output alone.

    A request with output gets its rows from the step itself, so its list is never looked at; that
    is so after a preemption too, since it keeps its output.
    """
    update = scheduler._update_after_schedule

    def update_and_list(scheduler_output: Any) -> None:
        scheduler.enable_return_routed_experts = False
        try:
            update(scheduler_output)
        finally:
            scheduler.enable_return_routed_experts = True
        group = scheduler.routed_experts_mgr.attn_gid
        for name in scheduler_output.num_scheduled_tokens:
            if scheduler.requests[name].num_output_tokens == 0:
                blocks = scheduler.kv_cache_manager.get_blocks(name)
                scheduler._re_block_ids[name] = blocks.get_block_ids()[group]

    scheduler._update_after_schedule = update_and_list


_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_RANK_VARIABLES += ("MASTER_ADDR", "MASTER_PORT")

_OVERHEAD_PARAMETERS = 400_000
"""Work of a token that does not grow with the model, such as sampling it, in parameters."""

_SMALL_STEP = 120_000_000
"""Tokens times parameters below which one thread is faster."""

# vLLM's CPU worker replaces torch's function by one that does nothing but write a warning.
_set_num_threads = torch.set_num_threads


@contextlib.contextmanager
def hidden_rank_variables() -> Iterator[None]:
    """Keep torchrun's variables from an engine that would take them for its own layout."""
    saved = {name: os.environ.pop(name) for name in _RANK_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(saved)


@contextlib.contextmanager
def cpu_threads(num_threads: int) -> Iterator[None]:
    """Run with another number of CPU threads; 0 leaves it alone."""
    before = torch.get_num_threads()
    if num_threads in (0, before):
        yield
        return
    _set_num_threads(num_threads)
    try:
        yield
    finally:
        _set_num_threads(before)


def step_threads(requested: int, num_parameters: int, num_tokens: int) -> int:
    """CPU threads for one step of an engine, 0 for torch's own number; `requested` 0 decides here.

    1 for a step so small that waking threads costs more than they save. On two cores two threads
    were 0.8 x as fast as one at 16 and 32 sequences of models of 0.1M, 0.8M and 1.2M parameters,
    and equally fast at 240, 100 and 200.
    """
    if requested:
        return requested
    return 1 if num_tokens * (num_parameters + _OVERHEAD_PARAMETERS) < _SMALL_STEP else 0


class StepThreads:
    """Chooses the CPU threads of an engine's steps."""

    def __init__(self, requested: int, num_parameters: int, *, on_cpu: bool) -> None:
        """Without `on_cpu` torch's number of threads is left alone."""
        self._requested = requested
        self._num_parameters = num_parameters
        self._on_cpu = on_cpu
        self._num_new = 0

    def add(self, num_tokens: int) -> None:
        """Count the tokens of a prompt that the next step will compute."""
        self._num_new += num_tokens

    def of_step(self, num_running: int) -> contextlib.AbstractContextManager[None]:
        """Threads for the next step, which decodes a token for each of so many requests."""
        num_tokens, self._num_new = self._num_new + num_running, 0
        if not self._on_cpu:
            return contextlib.nullcontext()
        return cpu_threads(step_threads(self._requested, self._num_parameters, num_tokens))
