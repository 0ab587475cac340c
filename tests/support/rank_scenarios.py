"""What one rank does in the tests with several ranks; the same code on one rank is the reference.

Each scenario returns plain values that do not depend on how many ranks share the work.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.tiny_models import (
    PackedRow,
    PolicyTrainer,
    full_gradients,
    full_parameters,
    packed_row,
    random_documents,
    tiny_trainer,
)
from tensordict import TensorDict
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rollverify.config.tables import TrainingConfig
from rollverify.losses.advantages import CreditRule
from rollverify.losses.objective import Objective
from rollverify.ranks import Ranks
from rollverify.rollout.trajectory import Status, append_segment, new_trajectory, set_outcome
from rollverify.training.policy_update import PolicyUpdate
from torchtitan_ext.reference_policy import ReferencePolicy

NUM_STEPS = 3

# Adam divides by |g| + eps. With an eps far above the rounding noise of a gradient (1e-8), one
# near 0 cannot turn its noise into a full step, so parameters can be compared.
ADAM_EPS = 1e-3


def trainer_of(model: Path, run: Path, **changes: Any) -> PolicyTrainer:
    """A trainer for these scenarios. Collective: yes, over the world."""
    return tiny_trainer(model, run, eps=ADAM_EPS, **changes)


def global_rows(step: int) -> list[PackedRow]:
    """Four rows of two documents of unequal length."""
    documents = random_documents([5, 30, 12, 12, 2, 60, 33, 8], seed=step)
    return [packed_row(documents[i : i + 2]) for i in range(0, 8, 2)]


def add_gradients(trainer: PolicyTrainer, step: int) -> None:
    """Forward and backward over the global batch, divided over the data ranks."""
    rows = global_rows(step)
    count = sum(row.tokens.numel() for row in rows)

    def loss(_: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
        return -(logprobs.sum() + 0.1 * entropy.sum()) / count

    mine = rows[trainer.data_rank :: trainer.data_world_size]
    trainer.forward_backward(mine, loss, temperature=0.7)


def take_global_step(trainer: PolicyTrainer, step: int) -> float:
    """One step on the global batch; returns the gradient norm."""
    add_gradients(trainer, step)
    return trainer.optimizer_step()[0]


def steps_scenario(model: Path, run: Path, **changes: Any) -> dict[str, Any]:
    """Three steps; weights, gradient norms and scores of one fixed row."""
    trainer = trainer_of(model, run, **changes)
    norms = [take_global_step(trainer, step) for step in range(NUM_STEPS)]
    result = {
        "parameters": full_parameters(trainer),
        "norms": norms,
        "score": trainer.score([global_rows(99)[2]], temperature=0.7)[0],
        "data_world_size": trainer.data_world_size,
    }
    trainer.close()
    return result


def gradients_scenario(model: Path, run: Path, **changes: Any) -> dict[str, Any]:
    """Weights as they were loaded, and the gradients of one global batch before any clipping."""
    trainer = trainer_of(model, run, **changes)
    loaded = full_parameters(trainer)
    add_gradients(trainer, step=0)
    result = {"loaded": loaded, "gradients": dict(full_gradients(trainer))}
    trainer.close()
    return result


def communication_scenario(model: Path, run: Path, **changes: Any) -> dict[str, Any]:
    """Calls of each collective for the gradients of one batch, and weights gathered in bfloat16."""
    trainer = trainer_of(model, run, **changes)
    with _Collectives() as two_rows:
        add_gradients(trainer, step=0)
    trainer.optimizers.zero_grad()
    with _Collectives() as one_row:
        trainer.forward_backward(global_rows(0)[:1], lambda _, logprobs, __: logprobs.sum())
    plain = {name: tensor.bfloat16() for name, tensor in trainer.hf_parameters()}
    with _Collectives() as gathered:
        cast = dict(trainer.hf_parameters(torch.bfloat16))
    trainer.close()
    return {
        "two_rows": two_rows.calls,
        "one_row": one_row.calls,
        "plain": plain,
        "cast": cast,
        "gathered": gathered.num_bytes,
    }


class _Collectives(TorchDispatchMode):
    """Counts the calls of each collective, and the bytes that all-gathers give."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if "c10d" in name:
            self.calls[name] = self.calls.get(name, 0) + 1
        if "all_gather_into_tensor" in name:
            self.num_bytes += out.numel() * out.element_size()
        return out


def trajectory(group: int, sample: int, length: int, reward: float) -> TensorDict:
    """A prompt of 2 tokens and a response; `length` tokens are fed to the model."""
    ids = random_documents([length + 1], seed=100 * group + sample)[0]
    size = length - 1
    made = new_trajectory(
        prompt_ids=ids[:2], group_id=group, prompt_index=group, sample_index=sample
    )
    logprobs = [-5.0 - 0.1 * i for i in range(size)]
    append_segment(made, ids[2:], logprobs, policy_version=0, seed=0)
    set_outcome(made, Status.LENGTH, reward)
    return made


def uneven_groups() -> list[list[TensorDict]]:
    """DH01: lengths [8, 8, 8] in one group, [4, 4] in the other."""
    return [
        [trajectory(0, i, 8, reward) for i, reward in enumerate([1.0, 0.0, 0.0])],
        [trajectory(1, i, 4, reward) for i, reward in enumerate([0.0, 1.0])],
    ]


def uneven_scenario(model: Path, run: Path, **changes: Any) -> dict[str, Any]:
    """One GRPO step with 8 tokens per row; group i belongs to data rank i, or all to one."""
    trainer = trainer_of(model, run, **changes)
    update = PolicyUpdate(
        trainer=trainer,
        objective=Objective(),
        credit=CreditRule(max_response_tokens=7),
        training=TrainingConfig(micro_batch_tokens=8),
        temperature=1.0,
        ranks=Ranks.of(trainer.data_group),
    )
    mine = uneven_groups()[trainer.data_rank :: trainer.data_world_size]
    metrics = update.train_step([one for group in mine for one in group], 0)
    result = {"parameters": full_parameters(trainer), "metrics": metrics}
    trainer.close()
    return result


def checkpoint_scenario(model: Path, run: Path, **changes: Any) -> dict[str, Any]:
    """Weights after three steps, and after two, a save, a load into a new trainer and the third."""
    first = trainer_of(model, run, **changes)
    for step in range(2):
        take_global_step(first, step)
    first.checkpointer.save(2)
    take_global_step(first, 2)
    again = trainer_of(model, run, **changes)
    again.checkpointer.load(2)
    take_global_step(again, 2)
    result = {"straight": full_parameters(first), "resumed": full_parameters(again)}
    first.close()
    again.close()
    return result


def reference_scenario(model: Path, run: Path, **changes: Any) -> dict[str, Any]:
    """Scores under start weights after two steps, and the policy before and after scoring."""
    trainer = trainer_of(model, run, **changes)
    row = [global_rows(99)[2]]
    start = trainer.score(row, temperature=0.7)[0]
    for step in range(2):
        take_global_step(trainer, step)
    before, own = full_parameters(trainer), trainer.score(row, temperature=0.7)[0]
    reference = ReferencePolicy(trainer)
    mine = global_rows(98)[trainer.data_rank :: trainer.data_world_size]
    scores = reference.score(mine, temperature=0.7)
    result = {
        "start": start,
        "reference": reference.score(row, temperature=0.7)[0],
        "own": (own, trainer.score(row, temperature=0.7)[0]),
        "rows": (trainer.data_rank, scores),
        "parameters": (before, full_parameters(trainer)),
    }
    take_global_step(trainer, 2)
    result["next"] = full_parameters(trainer)
    trainer.close()
    return result


SCENARIOS: dict[str, tuple[Callable[..., dict[str, Any]], str, dict[str, Any]]] = {
    "fsdp_tied": (steps_scenario, "tied", {}),
    "fsdp_untied": (steps_scenario, "untied", {}),
    "hsdp_tied": (
        steps_scenario,
        "tied",
        {"data_parallel_replicate": 2, "data_parallel_shard": 1},
    ),
    "communication_hsdp": (
        communication_scenario,
        "tied",
        {"data_parallel_replicate": 2, "data_parallel_shard": 1},
    ),
    "communication_fsdp": (communication_scenario, "tied", {}),
    # Two ranks share 3 heads, whose rows no rank could reorder head by head.
    "fsdp_llama": (steps_scenario, "llama", {}),
    "uneven_tied": (uneven_scenario, "tied", {}),
    "reference_tied": (reference_scenario, "tied", {}),
    "reference_untied": (reference_scenario, "untied", {}),
    "checkpoint_untied": (checkpoint_scenario, "untied", {}),
    "tensor_parallel_tied": (steps_scenario, "tied", {"tensor_parallel": 2}),
    "tensor_parallel_untied": (steps_scenario, "untied", {"tensor_parallel": 2}),
}
"""Name: (what to run, model folder, settings on two ranks)."""

MOE_SCENARIOS: dict[str, tuple[Callable[..., dict[str, Any]], str, dict[str, Any]]] = {
    "moe_gradients_fsdp": (gradients_scenario, "experts", {}),
    "moe_gradients_hsdp": (
        gradients_scenario,
        "experts",
        {"data_parallel_replicate": 2, "data_parallel_shard": 1},
    ),
    "moe_gradients_expert_parallel": (gradients_scenario, "experts", {"expert_parallel": 2}),
    "moe_gradients_tensor_parallel": (gradients_scenario, "experts", {"tensor_parallel": 2}),
    "moe_steps_fsdp": (steps_scenario, "experts", {}),
    "moe_steps_expert_parallel": (steps_scenario, "experts", {"expert_parallel": 2}),
    "moe_steps_tensor_parallel": (steps_scenario, "experts", {"tensor_parallel": 2}),
    "moe_uneven_expert_parallel": (uneven_scenario, "experts", {"expert_parallel": 2}),
    "moe_checkpoint_fsdp": (checkpoint_scenario, "experts", {}),
    "moe_checkpoint_expert_parallel": (checkpoint_scenario, "experts", {"expert_parallel": 2}),
}
"""The same for a model with experts."""
