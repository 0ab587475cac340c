"""Moves of whole groups between a rank's buffer, the prompt queue and other ranks.

Buffer, ledger and queue are changed together here, so that none of them loses a group. Does not
decide which groups go.
"""

import logging
from collections.abc import Callable

import torch.distributed as dist
from tensordict import TensorDict

from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.ledger import PromptLedger, PromptState
from rollverify.rollout.prompt_queue import PromptQueue
from rollverify.rollout.rank_exchange import balance, exchange, gather, tokens_of
from rollverify.rollout.schema import new_trajectory

logger = logging.getLogger(__name__)


def draw_group(
    queue: PromptQueue, buffer: TrajectoryBuffer, ledger: PromptLedger, group_size: int
) -> list[TensorDict]:
    """Draw a prompt and enter its group, without a token.

    Args:
        queue: gives the prompt.
        buffer: gets the group.
        ledger: learns of it, unless it was drawn before and came back.
        group_size: responses of a group.

    Returns:
        The trajectories by sample.
    """
    drawn = queue.draw()
    group = [
        new_trajectory(
            prompt_ids=drawn.prompt.token_ids,
            group_id=drawn.group_id,
            prompt_index=drawn.prompt.prompt_index,
            sample_index=sample,
            num_requests=drawn.num_requests,
        )
        for sample in range(group_size)
    ]
    buffer.add_group(group)
    if drawn.group_id not in ledger:
        ledger.add(drawn.group_id)
    return group


def drop_groups(
    buffer: TrajectoryBuffer,
    ledger: PromptLedger,
    queue: PromptQueue,
    may_go_on: Callable[[TensorDict], bool],
    why: str,
) -> int:
    """Give up groups in which some trajectory may not go on; their prompts return to the queue.

    They are its head, and start again with sampling streams that were not used before.

    Args:
        buffer: holds paused groups only; loses those.
        ledger: books them as pending.
        queue: gets their prompts.
        may_go_on: asked of each trajectory, finished or not.
        why: the reason, for the log.

    Returns:
        How many groups were dropped.
    """
    dropped = [g for g in buffer.group_ids() if not all(map(may_go_on, buffer.group(g)))]
    for group_id in dropped:
        group = buffer.pop_group(group_id, "dropped")
        ledger.move(group_id, PromptState.PENDING)
        num_requests = max(int(one["num_requests"]) for one in group)
        queue.put_back(group_id, int(group[0]["prompt_index"]), num_requests)
    if dropped:
        logger.info("%d unfinished groups are dropped and start again: %s", len(dropped), why)
    return len(dropped)


def balance_buffers(
    buffer: TrajectoryBuffer, ledger: PromptLedger, rank: int, group: dist.ProcessGroup | None
) -> None:
    """Even out the tokens that the ranks' buffers hold, so that none waits for another to score.

    Args:
        buffer: this rank's, with paused groups only.
        ledger: this rank's.
        rank: this rank's place among the data ranks.
        group: the data ranks; None where there is one.

    Source:
        Our choice; collective: yes, over `group`.
    """
    if group is None:
        return
    held = {group_id: buffer.group(group_id) for group_id in buffer.group_ids()}
    moves = balance(gather(tokens_of(held), group))
    leaving = [group_id for group_id, source, _ in moves if source == rank]
    parcel = {group_id: held[group_id] for group_id in leaving}
    states = {group_id: str(ledger.release(group_id)) for group_id in leaving}
    for group_id in leaving:
        buffer.pop_group(group_id, "moved")
    all_states = {g: state for part in gather(states, group) for g, state in part.items()}
    for group_id, members in exchange(parcel, moves, rank, group).items():
        buffer.add_group(members)
        ledger.adopt(group_id, PromptState(all_states[group_id]))
