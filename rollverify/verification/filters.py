"""Baselines of Section 3.3: whole trajectories are discarded, by age or by OPS, instead of cut."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rollverify.config.tables import FilterConfig
from rollverify.hooks import StepState
from rollverify.ranks import Ranks
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.layout import flat
from rollverify.rollout.ledger import PromptLedger, PromptState
from rollverify.verification.ops import sequence_ops, trajectory_staleness
from rollverify.verification.scoring import Scored


def keep_by_staleness(staleness: Tensor, max_staleness: int) -> Tensor:
    """[B] bool; staleness [B] in steps, of the oldest segment, at most the limit."""
    return staleness <= max_staleness


def keep_by_ops(sequence_ops: Tensor, max_ops: float) -> Tensor:
    """[B] bool; mean OPS [B] at most the limit, which is rounded to the dtype of the OPS."""
    return sequence_ops <= torch.tensor(max_ops, dtype=sequence_ops.dtype)


@dataclass(kw_only=True)
class TrajectoryFilter:
    """Discards what is above the limit and fills `filter/`; does nothing where it is off."""

    settings: FilterConfig
    buffer: TrajectoryBuffer
    ledger: PromptLedger
    ranks: Ranks

    def __call__(self, scored: Scored, state: StepState) -> Scored:
        """Discard in buffer and U_k; returns what is left. Collective over the data ranks."""
        if self.settings.name == "off":
            return scored
        is_kept = self._is_kept(scored, state.policy_version)
        num_tokens_before = self.buffer.num_tokens
        groups: set[int] = set()
        if self.settings.discard == "group":
            group_ids = [int(trajectory["group_id"]) for trajectory in scored.trajectories]
            groups = {group_ids[index] for index in _rejected(is_kept)}
            is_kept = torch.tensor([i not in groups for i in group_ids], dtype=torch.bool)
            self._give_up(groups, state)
        else:
            for index in _rejected(is_kept):
                self.buffer.discard(scored.trajectories[index])
        state.metrics |= self.ranks.sum(
            {
                "filter/trajectories_discarded": len(_rejected(is_kept)),
                "filter/groups_discarded": len(groups),
                "filter/tokens_discarded": num_tokens_before - self.buffer.num_tokens,
            }
        )
        return scored.only(is_kept)

    def _is_kept(self, scored: Scored, policy_version: int) -> Tensor:
        if self.settings.name == "ops":
            return keep_by_ops(sequence_ops(scored.ops, scored.layout), self.settings.max_ops)
        versions = flat(scored.trajectories, "policy_version")
        staleness = trajectory_staleness(versions, scored.layout, policy_version)
        return keep_by_staleness(staleness, self.settings.max_staleness)

    def _give_up(self, groups: set[int], state: StepState) -> None:
        for group_id in sorted(groups):
            self.buffer.pop_group(group_id, "filtered")
            self.ledger.move(group_id, PromptState.FILTERED)
        state.unfinished = [t for t in state.unfinished if int(t["group_id"]) not in groups]


def _rejected(is_kept: Tensor) -> list[int]:
    return (~is_kept).nonzero().squeeze(1).tolist()
