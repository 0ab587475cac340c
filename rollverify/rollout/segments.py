"""Grows and cuts one trajectory in place, all arrays per token together.

Does not decide where to cut or what to append; `buffer.py` counts what is done here.

Example: response [5, 6] of version 0, then 7 sampled under version 1: response_ids [5, 6, 7],
policy_version [0, 0, 1], segment_ids [0, 0, 1], is_reprefilled [False, False, True]. Cut at 1:
[5], [0], [0], [False], status unfinished.
"""

from collections.abc import Sequence

import torch
from tensordict import TensorDict

from rollverify.errors import RolloutError
from rollverify.rollout.routing import cut_rows
from rollverify.rollout.schema import FIELDS, Status, name_of, single_value

RESPONSE_KEYS = tuple(key for key, field in FIELDS.items() if field.per == "response")


def status_after(response_ids: Sequence[int], *, stop_token_id: int, max_tokens: int) -> Status:
    """Status of a response, from its tokens alone, whatever the engine said of its end.

    A request may be paused in the very step that drew the stop token or the last allowed one.

    Args:
        response_ids: the whole response.
        stop_token_id: id that ends a response.
        max_tokens: limit of a response, >= 1.

    Returns:
        STOP where the last token is the stop token, else LENGTH at the limit, else UNFINISHED.

    Raises:
        RolloutError: if the response is longer than the limit.
    """
    if len(response_ids) > max_tokens:
        raise RolloutError(
            f"a response of {len(response_ids)} tokens is above the limit of {max_tokens}"
        )
    if len(response_ids) > 0 and response_ids[-1] == stop_token_id:
        return Status.STOP
    return Status.LENGTH if len(response_ids) == max_tokens else Status.UNFINISHED


def append_segment(
    trajectory: TensorDict,
    token_ids: Sequence[int],
    behavior_logprobs: Sequence[float],
    *,
    policy_version: int,
    seed: int,
    mask_older: bool = False,
) -> None:
    """Append what one request generated.

    A request under the version of the last token goes on with its segment, another version begins
    the next one. Status and reward are left alone.

    Args:
        trajectory: changed in place.
        token_ids: new ids; may be empty.
        behavior_logprobs: nats, one per new id.
        policy_version: version that the engine held when the request was sent.
        seed: of the request's sampling stream.
        mask_older: True takes the tokens of older versions out of the loss.

    Raises:
        RolloutError: if ids and log-probs differ in number, a log-prob is not finite, or the last
            token is of a newer version.
    """
    if len(token_ids) != len(behavior_logprobs):
        raise RolloutError(
            f"{name_of(trajectory)}: {len(token_ids)} new tokens with "
            f"{len(behavior_logprobs)} log-probs"
        )
    size = len(token_ids)
    logprobs = torch.tensor(behavior_logprobs, dtype=torch.float32)
    if not bool(logprobs.isfinite().all()):
        raise RolloutError(f"{name_of(trajectory)}: the engine gave a log-prob that is not finite")
    segment, is_resumed = _next_segment(trajectory, policy_version)
    trajectory["seed"] = single_value("seed", seed)
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
    if mask_older:
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
    """Keep the first tokens of the response; the rest is gone from every array.

    A response that loses a token is unfinished and has no reward. Keeping all changes nothing.

    Args:
        trajectory: changed in place.
        num_kept: response tokens to keep, 0..R.

    Raises:
        ValueError: if `num_kept` is out of range.

    Source:
        RollVerify Algorithm 2 (the offending token goes too); one index for all arrays.
    """
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
    """Store how the response ended, or that it has not.

    Args:
        trajectory: changed in place.
        status: its status.
        reward: of the whole response; 0 while unfinished.

    Raises:
        ValueError: if an unfinished response is given a reward.
    """
    if status is Status.UNFINISHED and reward != 0.0:
        raise ValueError(f"{name_of(trajectory)} is unfinished and cannot have reward {reward}")
    trajectory["status"] = single_value("status", int(status))
    trajectory["reward"] = single_value("reward", reward)
