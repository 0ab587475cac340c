"""The TensorDict of one trajectory: its keys, their types and the one place that checks them.

A trajectory keeps its own length: tensors of different trajectories are never padded to each other.
Does not decide what a trajectory is trained on.

Example: prompt [7, 8], response [5, 6, 1] all sampled under version 4 gives response_ids [5, 6, 1],
behavior_logprobs of 3 nats, policy_version [4, 4, 4], segment_ids [0, 0, 0], loss_mask all True.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from tensordict import TensorDict
from torch import Tensor


class Status(IntEnum):
    """How far a trajectory is."""

    UNFINISHED = 0
    STOP = 1
    """Its last token is the stop token."""

    LENGTH = 2
    """It reached the response limit without the stop token."""


@dataclass(frozen=True, slots=True)
class Field:
    """One key of the TensorDict."""

    dtype: torch.dtype
    per: str
    """"prompt", "response" (one value per token) or "" (one value)."""

    meaning: str


FIELDS: dict[str, Field] = {
    "prompt_ids": Field(torch.int64, "prompt", "[P] ids of the prompt"),
    "response_ids": Field(torch.int64, "response", "[R] sampled ids, the stop token included"),
    "behavior_logprobs": Field(torch.float32, "response", "[R] nats, by the engine at sampling"),
    "policy_version": Field(torch.int32, "response", "[R] version that sampled the token"),
    "segment_ids": Field(torch.int32, "response", "[R] index of the run of equal versions, from 0"),
    "loss_mask": Field(torch.bool, "response", "[R] True on tokens the loss sums over"),
    "reward": Field(torch.float32, "", "reward of the whole response"),
    "status": Field(torch.int64, "", "a `Status`"),
    "group_id": Field(torch.int64, "", "number of the group in drawing order, unique in a run"),
    "sample_index": Field(torch.int64, "", "place in the group, from 0"),
    "seed": Field(torch.int64, "", "seed of the sampling stream"),
}


def validate_trajectory(trajectory: TensorDict) -> None:
    """Check keys, types and lengths.

    Raises:
        ValueError: naming the group, the sample and the key that is wrong.
    """
    missing = FIELDS.keys() - set(trajectory.keys())
    unknown = set(trajectory.keys()) - FIELDS.keys()
    if missing or unknown:
        raise ValueError(f"trajectory lacks {sorted(missing)} and has unknown {sorted(unknown)}")
    name = f"group {int(trajectory['group_id'])} sample {int(trajectory['sample_index'])}"
    lengths = {"": torch.Size([]), "prompt": trajectory["prompt_ids"].shape[:1]}
    lengths["response"] = trajectory["response_ids"].shape[:1]
    for key, field in FIELDS.items():
        value = trajectory[key]
        if value.dtype != field.dtype:
            raise ValueError(f"{name}: {key} must be {field.dtype}, got {value.dtype}")
        if value.shape != lengths[field.per]:
            raise ValueError(
                f"{name}: {key} has shape {list(value.shape)}, expected {list(lengths[field.per])}"
            )
    if not torch.isfinite(trajectory["behavior_logprobs"]).all():
        raise ValueError(f"{name}: behavior_logprobs holds a value that is not finite")
    if len(trajectory["prompt_ids"]) == 0:
        raise ValueError(f"{name}: the prompt is empty")


def make_trajectory(
    *,
    prompt_ids: list[int] | tuple[int, ...],
    response_ids: list[int],
    behavior_logprobs: list[float],
    policy_version: int,
    status: Status,
    reward: float,
    group_id: int,
    sample_index: int,
    seed: int,
) -> TensorDict:
    """Build and check the trajectory of a response sampled under one version.

    Args:
        prompt_ids: P ids, at least one.
        response_ids: R ids.
        behavior_logprobs: R nats.
        policy_version: version that sampled all tokens.
        status: how the response ended.
        reward: of the whole response.
        group_id: number of its group.
        sample_index: place in the group.
        seed: of its sampling stream.

    Returns:
        TensorDict with the keys of `FIELDS` and batch size [].

    Raises:
        ValueError: see `validate_trajectory`.
    """
    size = len(response_ids)
    trajectory = TensorDict(
        {
            "prompt_ids": torch.tensor(prompt_ids, dtype=torch.int64),
            "response_ids": torch.tensor(response_ids, dtype=torch.int64),
            "behavior_logprobs": torch.tensor(behavior_logprobs, dtype=torch.float32),
            "policy_version": torch.full((size,), policy_version, dtype=torch.int32),
            "segment_ids": torch.zeros(size, dtype=torch.int32),
            "loss_mask": torch.ones(size, dtype=torch.bool),
            "reward": torch.tensor(reward, dtype=torch.float32),
            "status": torch.tensor(int(status)),
            "group_id": torch.tensor(group_id),
            "sample_index": torch.tensor(sample_index),
            "seed": torch.tensor(seed),
        },
        batch_size=[],
    )
    validate_trajectory(trajectory)
    return trajectory


def num_tokens(trajectory: TensorDict) -> int:
    """Prompt plus response tokens."""
    return len(trajectory["prompt_ids"]) + len(trajectory["response_ids"])


def stacked(trajectories: list[TensorDict], key: str) -> Tensor:
    """[B] values of a per-trajectory key, in order.

    Args:
        trajectories: B of them.
        key: a key of `FIELDS` with one value per trajectory.

    Returns:
        [B], the key's dtype.

    Raises:
        ValueError: if the key holds one value per token.
    """
    if FIELDS[key].per:
        raise ValueError(f"'{key}' holds one value per token")
    if not trajectories:
        return torch.zeros(0, dtype=FIELDS[key].dtype)
    return torch.stack([trajectory[key] for trajectory in trajectories])
