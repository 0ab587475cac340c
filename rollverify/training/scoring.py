"""Log-probs of responses under the trainer's weights now, trajectory by trajectory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensordict import TensorDict
from torch import Tensor

from rollverify.engine.model_folder import RoutingShape
from rollverify.errors import RolloutError
from rollverify.ranks import Ranks
from rollverify.rollout.layout import response_layout
from rollverify.rollout.trajectory import name_of
from rollverify.training.packing import (
    PackedRow,
    filler_rows,
    pack_for_scoring,
    response_values,
    trajectory_values,
)

if TYPE_CHECKING:
    from torchtitan_ext.policy_trainer import PolicyTrainer


@dataclass(kw_only=True)
class TrajectoryScorer:
    """ComputeProb of RollVerify Algorithm 1, over trajectories packed into rows."""

    trainer: "PolicyTrainer"
    micro_batch_tokens: int  # of the packed rows scored at the same time
    temperature: float  # of sampling; log-probs are taken under it
    ranks: Ranks
    routing: RoutingShape | None = None  # where recorded experts are replayed

    def score(self, trajectories: Sequence[TensorDict]) -> Tensor:
        """[N] float32 nats on the CPU; all response tokens end to end. Collective."""
        rows = self._rows(trajectories, with_routing=self.routing is not None)
        scores = self.trainer.score(rows, temperature=self.temperature)
        return response_values(rows, scores, trajectories)

    def score_and_route(
        self, trajectories: Sequence[TensorDict]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """`score` and the router's own choice (routing replay R2). Collective.

        Expert ids of the F fed tokens of each trajectory, [F, L, K] on the CPU; None for an empty
        response.
        """
        rows = self._rows(trajectories, with_routing=False)
        scores, routes = self.trainer.score_and_route(rows, temperature=self.temperature)
        if self.routing is not None:  # The engine's type, so that rows of both can be joined.
            routes = [ids.to(self.routing.dtype) for ids in routes]
        own_routes = trajectory_values(rows, routes, len(trajectories))
        return response_values(rows, scores, trajectories), own_routes

    def _rows(self, trajectories: Sequence[TensorDict], *, with_routing: bool) -> list[PackedRow]:
        """As many on every rank, since all take part in each pass: the last may be fillers."""
        rows = pack_for_scoring(
            trajectories,
            self.micro_batch_tokens,
            rows_at_once=self.trainer.rows_at_once,
            with_routing=with_routing,
        )
        num_missing = self.ranks.largest(len(rows)) - len(rows)
        return [*rows, *filler_rows(num_missing, self.routing if with_routing else None)]


def check_finite(values: Tensor, trajectories: Sequence[TensorDict], name: str) -> None:
    """RolloutError naming the first response token whose value in `values`, [N], is not finite."""
    bad = (~values.isfinite()).nonzero()
    if len(bad):
        token, layout = int(bad[0]), response_layout(trajectories)
        owner = int(layout.token_owners[token])
        raise RolloutError(
            f"{name_of(trajectories[owner])}: {name} of response token "
            f"{token - int(layout.trajectory_starts[owner])} is {values[token].item()}, "
            "must be finite"
        )
