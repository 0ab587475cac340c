"""One vLLM engine over several ranks of the trainer's world, a part of it in each process.

Every member runs the same requests through a scheduler of its own, which decides the same; only
the model's matrix products are split and meet in collectives.
"""

import secrets
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from rollverify.ranks import Ranks


class MemberExecutor(UniProcExecutor):
    """This rank's part of the model, in this process, on the device that the trainer uses."""

    run_name = ""
    """The same on all ranks of a run and of no other on this machine: names shared memory."""

    def _distributed_args(self) -> tuple[str, int, int]:
        device = torch.cuda.current_device() if torch.cuda.is_available() else 0
        # No file of this name is made: the ranks have met already.
        return f"file:///{self.run_name}", dist.get_rank(), device

    def determine_available_memory(self) -> list[int]:
        """Bytes for the cache, of the member that has least: all must have as many blocks."""
        bytes_free = torch.tensor(super().determine_available_memory(), dtype=torch.int64)
        dist.all_reduce(bytes_free, op=dist.ReduceOp.MIN, group=get_tp_group().cpu_group)
        return bytes_free.tolist()


def member_arguments(num_members: int) -> dict[str, Any]:
    """Engine arguments of a rank whose engine spans `num_members` ranks; none for 1. Collective."""
    if num_members == 1:
        return {}
    MemberExecutor.run_name = Ranks.world().from_first(f"rollverify-{secrets.token_hex(8)}")
    return {
        "tensor_parallel_size": num_members,
        "distributed_executor_backend": MemberExecutor,
    }


def engine_ranks() -> Ranks:
    """The members of this rank's engine, once it has started."""
    return Ranks.of(get_tp_group().cpu_group)


def own_part(model: torch.nn.Module) -> Callable[[str, str, Tensor], Tensor]:
    """What this member holds of a full weight: a view.

    The function takes the engine's parameter name, the weight's Hugging Face name and the weight.
    """
    group = get_tp_group()
    rank, size = group.rank_in_group, group.world_size

    def part(own_name: str, name: str, weight: Tensor) -> Tensor:
        module: Any = model.get_submodule(own_name.rpartition(".")[0])
        if isinstance(module, VocabParallelEmbedding):
            rows = module.shard_indices
            return weight[rows.org_vocab_start_index : rows.org_vocab_end_index]
        if isinstance(module, QKVParallelLinear) and ".q_proj." not in name:
            # With fewer heads of keys and values than members, some hold the same one.
            replicas = module.num_kv_head_replicas
            return _share(weight, 0, rank // replicas, size // replicas)
        if isinstance(module, ColumnParallelLinear):
            return _share(weight, 0, rank, size)
        if isinstance(module, RowParallelLinear):
            return _share(weight, 1, rank, size)
        if hasattr(module, "moe_config"):  # [inner, hidden] or [experts, inner, hidden]
            return _share(weight, -1 if "down_proj" in name else -2, rank, size)
        return weight

    return part


def _share(weight: Tensor, dim: int, rank: int, size: int) -> Tensor:
    length = weight.shape[dim] // size
    return weight.narrow(dim, rank * length, length)
