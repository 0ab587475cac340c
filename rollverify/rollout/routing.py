"""Expert ids of a trajectory's tokens: how many rows there are and how they grow and are cut.

Row j of `routed_experts` belongs to the token at position j of prompt and response, whose forward
pass gave the distribution of token j + 1. The last sampled token was never fed and has no row; a
response that has not begun has none at all. Does not decide whether routing is recorded.

Example: prompt of 3, response of 4 tokens: 6 rows. Cut to 2 response tokens: 4 rows.
"""

import torch
from tensordict import TensorDict
from torch import Tensor

from rollverify.errors import RolloutError
from rollverify.rollout.schema import ROUTING, name_of, num_fed_tokens


def num_rows(trajectory: TensorDict) -> int:
    """Rows of routing that are held."""
    return len(trajectory[ROUTING]) if ROUTING in trajectory else 0


def is_routed(trajectory: TensorDict, *, except_version: int | None = None) -> bool:
    """Whether every token that was fed to the model has its row.

    Args:
        trajectory: finished or not.
        except_version: newest version, whose tokens need no row yet; None: all tokens need theirs.

    Returns:
        True without tokens.
    """
    if except_version is None:
        return num_rows(trajectory) == num_fed_tokens(trajectory)
    num_older = int((trajectory["policy_version"] != except_version).sum())
    num_prompt = len(trajectory["prompt_ids"])
    return num_older == 0 or num_rows(trajectory) >= num_prompt + num_older - 1


def check_routed(trajectory: TensorDict) -> None:
    """Make sure that every token has its row.

    Raises:
        RolloutError: naming the trajectory; a missing row is never filled with some expert.
    """
    if not is_routed(trajectory):
        raise RolloutError(
            f"{name_of(trajectory)}: {num_rows(trajectory)} rows of expert ids for "
            f"{num_fed_tokens(trajectory)} tokens; the routing of some tokens was not recorded"
        )


def join_routing(trajectory: TensorDict, given: Tensor, *, replace: bool) -> None:
    """Take in the routing of a context whose newest tokens are already in the trajectory.

    Args:
        trajectory: changed in place.
        given: [F, L, K] uint8 or int16; one row for each of its F fed tokens, from the first on.
        replace: True takes all rows as given; False keeps the rows that are held and appends the
            others, so that each row stays the one its token was sampled with.

    Raises:
        RolloutError: if the number of rows is another, or layers, experts per token or type differ
            from what is held.

    Source:
        Rollout routing replay (arXiv 2510.11370); to keep rows is our choice.
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
    """Tokens that a new forward pass over a held context routes to other experts.

    Args:
        trajectory: holds H rows.
        given: [>= H, L, K]; rows of the same tokens, from the first on.

    Returns:
        Held rows whose set of experts differs in some layer.
    """
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
