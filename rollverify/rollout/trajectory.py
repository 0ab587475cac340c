"""The TensorDict of one trajectory: its keys, what grows and cuts it, and what must hold of it.

Tensors are never padded; one index cuts every array of a response.

Example: prompt [7, 8], response [5, 6, 1] all sampled under version 4 gives response_ids [5, 6, 1],
behavior_logprobs of 3 nats, policy_version [4, 4, 4], segment_ids [0, 0, 0], loss_mask all True.
"""

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NotRequired, TypedDict, Unpack

import torch
from tensordict import TensorDict
from torch import Tensor

from rollverify.errors import RolloutError, UnverifiedTrajectoryError


class Status(IntEnum):
    """How far a trajectory is."""

    UNFINISHED = 0
    STOP = 1
    LENGTH = 2
    """At the response limit, without the stop token."""


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

RESPONSE_KEYS = tuple(key for key, field in FIELDS.items() if field.per == "response")

ROUTING = "routed_experts"
"""[F, L, K] ids of the K experts of each fed token in each of the L layers, once recorded."""

ROUTING_DTYPES = (torch.uint8, torch.int16)
"""One byte per id up to 256 experts, else two."""

SHARED = frozenset(("status", "group_id", "prompt_index", "sample_index", "verified_version"))
"""Keys whose equal values are one tensor in all trajectories: never write to it in place."""


def single_value(key: str, value: float) -> Tensor:
    """A tensor [] of one value; for keys of `SHARED` one object a value, which saves memory."""
    return _shared_value(key, value) if key in SHARED else _new_value(key, value)


def _new_value(key: str, value: float) -> Tensor:
    return torch.tensor(value, dtype=FIELDS[key].dtype)


_shared_value = functools.lru_cache(maxsize=1024)(_new_value)


def new_trajectory(
    *,
    prompt_ids: Sequence[int],
    group_id: int,
    prompt_index: int,
    sample_index: int,
    num_requests: int = 0,
) -> TensorDict:
    """A trajectory that has not begun; `num_requests` streams were used by an earlier attempt."""
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
    values |= {key: torch.zeros(0, dtype=FIELDS[key].dtype) for key in RESPONSE_KEYS}
    values["prompt_ids"] = torch.tensor(prompt_ids, dtype=torch.int64)
    trajectory = TensorDict(values, batch_size=[])
    validate_trajectory(trajectory)
    return trajectory


def validate_trajectory(trajectory: TensorDict) -> None:
    """Check keys, types and lengths; a ValueError names group, sample and key."""
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
    """Which trajectory this is, in words for messages and logs."""
    return f"group {int(trajectory['group_id'])} sample {int(trajectory['sample_index'])}"


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


def stacked(trajectories: Sequence[TensorDict], key: str) -> Tensor:
    """[B] values of a key with one value per trajectory, in order."""
    if not trajectories:
        return torch.zeros(0, dtype=FIELDS[key].dtype)
    return torch.stack([trajectory[key] for trajectory in trajectories])


def status_after(
    response_ids: Tensor | Sequence[int], *, stop_token_ids: Collection[int], max_tokens: int
) -> Status:
    """Status from all tokens [R] alone: a pause may fall into the step of the stop token."""
    if len(response_ids) > max_tokens:
        raise RolloutError(
            f"a response of {len(response_ids)} tokens is above the limit of {max_tokens}"
        )
    if len(response_ids) > 0 and int(response_ids[-1]) in stop_token_ids:
        return Status.STOP
    return Status.LENGTH if len(response_ids) == max_tokens else Status.UNFINISHED


class Request(TypedDict):
    """How the tokens that are appended were sampled."""

    policy_version: int
    """Of the engine when the request was sent."""

    seed: int
    """Of its sampling stream."""

    mask_older: NotRequired[bool]
    """Tokens of older versions leave the loss."""


def append_segment(
    trajectory: TensorDict,
    token_ids: Sequence[int],
    behavior_logprobs: Sequence[float],
    **request: Unpack[Request],
) -> None:
    """Append what one request generated: new ids, maybe none, and their log-probs in nats.

    A request under the version of the last token goes on with its segment, another version begins
    the next one. Status and reward are left alone.
    """
    size, policy_version = len(token_ids), request["policy_version"]
    if size != len(behavior_logprobs):
        raise RolloutError(
            f"{name_of(trajectory)}: {size} new tokens with {len(behavior_logprobs)} log-probs"
        )
    logprobs = torch.tensor(behavior_logprobs, dtype=torch.float32)
    if not bool(logprobs.isfinite().all()):
        raise RolloutError(f"{name_of(trajectory)}: the engine gave a log-prob that is not finite")
    segment, is_resumed = _next_segment(trajectory, policy_version)
    trajectory["seed"] = single_value("seed", request["seed"])
    trajectory["num_requests"] = single_value("num_requests", int(trajectory["num_requests"]) + 1)
    if size == 0:
        return
    new = {
        "response_ids": torch.tensor(token_ids, dtype=torch.int64),
        "behavior_logprobs": logprobs,
        "anchor_logprobs": torch.full((size,), float("nan"), dtype=torch.float32),
        "policy_version": torch.full((size,), policy_version, dtype=torch.int32),
        "segment_ids": torch.full((size,), segment, dtype=torch.int32),
        "loss_mask": torch.ones(size, dtype=torch.bool),
        "is_reprefilled": torch.full((size,), is_resumed),
    }
    if not is_resumed:
        trajectory.update(new)
        return
    for key in RESPONSE_KEYS:
        trajectory[key] = torch.cat([trajectory[key], new[key]])
    if request.get("mask_older", False):
        trajectory["loss_mask"] = trajectory["policy_version"] == policy_version


def _next_segment(trajectory: TensorDict, policy_version: int) -> tuple[int, bool]:
    """(segment id of new tokens, whether there are older tokens)."""
    versions = trajectory["policy_version"]
    if len(versions) == 0:
        return 0, False
    newest = int(versions[-1])
    if newest > policy_version:
        raise RolloutError(
            f"{name_of(trajectory)} holds tokens of version {newest} and cannot go on under "
            f"version {policy_version}"
        )
    return int(trajectory["segment_ids"][-1]) + (newest < policy_version), True


def truncate(trajectory: TensorDict, num_kept: int) -> None:
    """Keep the first tokens (RollVerify Algorithm 2); a response cut short is unfinished again."""
    size = len(trajectory["response_ids"])
    if not 0 <= num_kept <= size:
        raise ValueError(f"{name_of(trajectory)}: cannot keep {num_kept} of {size} tokens")
    if num_kept == size:
        return
    for key in RESPONSE_KEYS:
        # A copy: a view would keep the tokens that are gone in memory.
        trajectory[key] = trajectory[key][:num_kept].clone()
    cut_rows(trajectory)
    set_outcome(trajectory, Status.UNFINISHED, 0.0)


def set_outcome(trajectory: TensorDict, status: Status, reward: float) -> None:
    """Store how the response ended, or that it has not."""
    trajectory["status"] = single_value("status", int(status))
    trajectory["reward"] = single_value("reward", reward)


def is_current(trajectory: TensorDict, policy_version: int, *, verified: bool) -> bool:
    """Whether no token is older than the policy; `verified`: or they were verified against it."""
    versions = trajectory["policy_version"]
    if len(versions) == 0 or int(versions[0]) == policy_version:
        return True
    return verified and int(trajectory["verified_version"]) == policy_version


def check_verified(trajectories: Sequence[TensorDict], policy_version: int) -> None:
    """Make sure that every older token was verified against the policy now."""
    for trajectory in trajectories:
        if not is_current(trajectory, policy_version, verified=True):
            raise UnverifiedTrajectoryError(
                f"{name_of(trajectory)} was last verified against version "
                f"{int(trajectory['verified_version'])}, the policy now is version {policy_version}"
            )


def num_rows(trajectory: TensorDict) -> int:
    """Rows of routing that are held."""
    return len(trajectory[ROUTING]) if ROUTING in trajectory else 0


def is_routed(trajectory: TensorDict, *, except_version: int | None = None) -> bool:
    """Whether every token that was fed to the model has its row; those of one version need none."""
    if except_version is None:
        return num_rows(trajectory) == num_fed_tokens(trajectory)
    num_older = int((trajectory["policy_version"] != except_version).sum())
    num_prompt = len(trajectory["prompt_ids"])
    return num_older == 0 or num_rows(trajectory) >= num_prompt + num_older - 1


def check_routed(trajectory: TensorDict) -> None:
    """Make sure that every token has its row."""
    if not is_routed(trajectory):
        raise RolloutError(
            f"{name_of(trajectory)}: {num_rows(trajectory)} rows of expert ids for "
            f"{num_fed_tokens(trajectory)} tokens; the routing of some tokens was not recorded"
        )


def join_routing(trajectory: TensorDict, given: Tensor, *, replace: bool) -> None:
    """Take in rows [F, L, K] of a whole context (rollout routing replay, arXiv 2510.11370).

    Unless `replace`, held rows stay, so that each is the one its token was sampled with.
    """
    expected = num_fed_tokens(trajectory)
    if given.ndim != 3 or len(given) != expected:
        raise RolloutError(
            f"{name_of(trajectory)}: routing of shape {list(given.shape)} for {expected} tokens, "
            "one row each is needed"
        )
    held = num_rows(trajectory)
    if held == 0 or replace:
        trajectory[ROUTING] = given.clone()
        return
    old = trajectory[ROUTING]
    if old.shape[1:] != given.shape[1:] or old.dtype != given.dtype:
        raise RolloutError(
            f"{name_of(trajectory)}: routing of {list(given.shape[1:])} {given.dtype} per token "
            f"does not go on from {list(old.shape[1:])} {old.dtype}"
        )
    trajectory[ROUTING] = torch.cat([old, given[held:]])


def num_changed_rows(trajectory: TensorDict, given: Tensor) -> int:
    """Held rows whose set of experts differs in some layer from `given` [F, L, K], a new pass."""
    held = num_rows(trajectory)
    if held == 0:
        return 0
    differs = trajectory[ROUTING].sort(-1).values != given[:held].sort(-1).values
    return int(differs.flatten(1).any(1).sum())


def cut_rows(trajectory: TensorDict) -> None:
    """Drop the rows of tokens that are gone; call after the response was cut."""
    if ROUTING not in trajectory:
        return
    expected = num_fed_tokens(trajectory)
    if expected == 0:
        del trajectory[ROUTING]
    else:
        trajectory[ROUTING] = trajectory[ROUTING][:expected].clone()
