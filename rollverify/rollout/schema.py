"""The TensorDict of one trajectory: its keys, their types and the one place that checks them.

A trajectory keeps its own length: tensors of different trajectories are never padded to each other.
Does not decide what a trajectory is trained on.

Example: prompt [7, 8], response [5, 6, 1] all sampled under version 4 gives response_ids [5, 6, 1],
behavior_logprobs of 3 nats, policy_version [4, 4, 4], segment_ids [0, 0, 0], loss_mask all True.
`segments.py` grows and cuts it.
"""

import functools
from collections.abc import Sequence
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
    "anchor_logprobs": Field(
        torch.float32,
        "response",
        "[R] nats, by the trainer under the version that sampled the token; NaN until scored",
    ),
    "policy_version": Field(torch.int32, "response", "[R] version that sampled the token"),
    "segment_ids": Field(torch.int32, "response", "[R] index of the run of equal versions, from 0"),
    "loss_mask": Field(torch.bool, "response", "[R] True on tokens the loss sums over"),
    "is_reprefilled": Field(
        torch.bool, "response", "[R] True where the keys and values before the token were rebuilt"
    ),
    "reward": Field(torch.float32, "", "reward of the whole response; 0 while unfinished"),
    "status": Field(torch.int64, "", "a `Status`"),
    "group_id": Field(torch.int64, "", "number of the group in drawing order, unique in a run"),
    "prompt_index": Field(torch.int64, "", "place of the prompt in the training set"),
    "sample_index": Field(torch.int64, "", "place in the group, from 0"),
    "seed": Field(torch.int64, "", "seed of the newest sampling stream"),
    "num_requests": Field(torch.int64, "", "sampling streams begun so far; decides the next seed"),
    "verified_version": Field(torch.int64, "", "version last verified against, -1 for none"),
}

ROUTING = "routed_experts"
"""Key that only trajectories of mixture-of-experts models have, once routing is recorded:
[F, L, K] ids of the experts of each fed token in each of the L layers; see `routing.py`."""

ROUTING_DTYPES = (torch.uint8, torch.int16)
"""One byte per id up to 256 experts, else two."""


SHARED = frozenset(("status", "group_id", "prompt_index", "sample_index", "verified_version"))
"""Keys whose equal values are one tensor in all trajectories, so they must never be written to in
place. Rewards and counters, which a hook might well add to, are not among them."""


def single_value(key: str, value: float) -> Tensor:
    """A key's single value as a tensor.

    A tensor takes half a kilobyte beside its number, in a short response more than its tokens do,
    and most trajectories agree in most of `SHARED`.

    Args:
        key: of `FIELDS`, with one value per trajectory.
        value: what it holds.

    Returns:
        [] of the key's dtype; for keys of `SHARED` the same object for the same value.
    """
    return _shared_value(key, value) if key in SHARED else _new_value(key, value)


def _new_value(key: str, value: float) -> Tensor:
    return torch.tensor(value, dtype=FIELDS[key].dtype)


_shared_value = functools.lru_cache(maxsize=1024)(_new_value)


def validate_trajectory(trajectory: TensorDict) -> None:
    """Check keys, types and lengths.

    Raises:
        ValueError: naming the group, the sample and the key that is wrong.
    """
    missing = FIELDS.keys() - set(trajectory.keys())
    unknown = set(trajectory.keys()) - FIELDS.keys() - {ROUTING}
    if missing or unknown:
        raise ValueError(f"trajectory lacks {sorted(missing)} and has unknown {sorted(unknown)}")
    name = name_of(trajectory)
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
    if ROUTING in trajectory:
        _validate_routing(trajectory, name)


def _validate_routing(trajectory: TensorDict, name: str) -> None:
    """Rows may lag behind the tokens until they are recorded, but never lead."""
    routing, most = trajectory[ROUTING], num_fed_tokens(trajectory)
    if routing.dtype not in ROUTING_DTYPES:
        raise ValueError(f"{name}: {ROUTING} must be uint8 or int16, got {routing.dtype}")
    if routing.ndim != 3 or len(routing) > most:
        raise ValueError(
            f"{name}: {ROUTING} has shape {list(routing.shape)}, expected at most {most} rows of "
            "[layers, experts per token]"
        )


def name_of(trajectory: TensorDict) -> str:
    """Say in words which trajectory this is, for messages and logs."""
    return f"group {int(trajectory['group_id'])} sample {int(trajectory['sample_index'])}"


def new_trajectory(
    *,
    prompt_ids: Sequence[int],
    group_id: int,
    prompt_index: int,
    sample_index: int,
    num_requests: int = 0,
) -> TensorDict:
    """Build a trajectory that has not begun: an empty response, status unfinished.

    Args:
        prompt_ids: P ids, at least one.
        group_id: number of its group.
        prompt_index: place of the prompt in the training set.
        sample_index: place in the group.
        num_requests: sampling streams that an earlier attempt at this sample has used.

    Returns:
        TensorDict with the keys of `FIELDS` and batch size [].

    Raises:
        ValueError: see `validate_trajectory`.
    """
    single = {
        "status": int(Status.UNFINISHED),
        "group_id": group_id,
        "prompt_index": prompt_index,
        "sample_index": sample_index,
        "seed": 0,
        "num_requests": num_requests,
        "verified_version": -1,
        "reward": 0.0,
    }
    values = {key: single_value(key, value) for key, value in single.items()}
    for key, field in FIELDS.items():
        if field.per == "response":
            values[key] = torch.zeros(0, dtype=field.dtype)
    values["prompt_ids"] = torch.tensor(prompt_ids, dtype=torch.int64)
    trajectory = TensorDict(values, batch_size=[])
    validate_trajectory(trajectory)
    return trajectory


def is_finished(trajectory: TensorDict) -> bool:
    """Whether the response has ended, by the stop token or at the limit."""
    return int(trajectory["status"]) != Status.UNFINISHED


def num_tokens(trajectory: TensorDict) -> int:
    """Prompt plus response tokens."""
    return len(trajectory["prompt_ids"]) + len(trajectory["response_ids"])


def num_fed_tokens(trajectory: TensorDict) -> int:
    """Tokens a forward pass over the response is fed: all but the last; 0 before it begins."""
    num_response = len(trajectory["response_ids"])
    return len(trajectory["prompt_ids"]) + num_response - 1 if num_response else 0


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
