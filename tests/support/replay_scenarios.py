"""What one rank does in the tests of routing replay; the same code on one rank is the reference."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.tiny_models import (
    PackedRow,
    full_gradients,
    full_parameters,
    packed_row,
    random_documents,
    tiny_trainer,
)
from torch import Tensor

NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 8, 2
DENSE_LAYER = 1
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "expert_parallel": {"expert_parallel": 2},
    "tensor_parallel": {"tensor_parallel": 2},
    "full_recomputation": {"expert_parallel": 2, "activation_checkpoint": "full"},
}


def global_rows() -> list[PackedRow]:
    """Four rows of unequal length; the third one's experts are left to the routers."""
    generator = torch.Generator().manual_seed(7)
    rows = []
    for index, lengths in enumerate([(5, 30), (12, 12), (2, 60), (33, 8)]):
        row = packed_row(random_documents(lengths, seed=index))
        shape = (row.tokens.numel(), NUM_LAYERS, NUM_EXPERTS)
        ids = torch.rand(shape, generator=generator).argsort(-1)[..., :TOP_K].to(torch.uint8)
        rows.append(replace(row, routed_experts=None if index == 2 else ids))
    return rows


def replay_scenario(model: Path, run: Path, **changes: Any) -> dict[str, Any]:
    """One step on the global batch, rows dealt out over the data ranks; sums over ranks.

    Collective: yes, over the world.
    """
    trainer = tiny_trainer(model, run, eps=1e-3, **changes)
    rows = global_rows()
    mine = rows[trainer.data_rank :: trainer.data_world_size]
    count = sum(row.tokens.numel() for row in rows)
    _, own = trainer.score_and_route(mine)

    def loss(_: int, logprobs: Tensor, __: Tensor) -> Tensor:
        return -logprobs.sum() / count

    trainer.forward_backward(mine, loss)
    stats = trainer.take_routing_stats()
    assert stats is not None
    totals = [torch.tensor(stats.num_tokens), stats.changed_L, stats.load_LE]
    if trainer.data_group is not None:
        for total in totals:
            dist.all_reduce(total, group=trainer.data_group)
    result = {
        "own": own[0],  # Of the first row, which is rank 0's in every layout.
        "stats": totals,
        "gradients": {
            name.replace("_checkpoint_wrapped_module.", ""): one
            for name, one in full_gradients(trainer)
        },
        "norm": trainer.optimizer_step()[0],
        "parameters": full_parameters(trainer),
        "scores": trainer.score(mine)[0],
    }
    trainer.close()
    return result
