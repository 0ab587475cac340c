"""Log-probs of responses under the trainer's weights now, trajectory by trajectory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict
from torch import Tensor

from rollverify.engine.model_folder import RoutingShape
from rollverify.errors import RolloutError
from rollverify.ranks import Ranks
from rollverify.rollout.layout import response_layout
from rollverify.rollout.trajectory import name_of, num_fed_tokens
from rollverify.rollout.twins import Twins
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
    """ComputeProb of RollVerify Algorithm 1, over trajectories packed into rows.

    Twins score a part each and tell each other.
    """

    trainer: "PolicyTrainer"
    micro_batch_tokens: int  # of the packed rows scored at the same time
    temperature: float  # of sampling; log-probs are taken under it
    ranks: Ranks  # that score different trajectories
    twins: Twins = field(default_factory=Twins)
    routing: RoutingShape | None = None  # where recorded experts are replayed

    def score(self, trajectories: Sequence[TensorDict]) -> Tensor:
        """[N] float32 nats on the CPU; all response tokens end to end. Collective."""
        own = [trajectories[place] for place in self.twins.own_places(trajectories)]
        rows = self._rows(own, with_routing=self.routing is not None)
        scores = self.trainer.score(rows, temperature=self.temperature)
        return self._joined(response_values(rows, scores, own), own, trajectories)

    def score_and_route(
        self, trajectories: Sequence[TensorDict]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """`score` and the router's own choice (routing replay R2). Collective.

        Expert ids of the F fed tokens of each trajectory, [F, L, K] on the CPU; None for an empty
        response.
        """
        own = [trajectories[place] for place in self.twins.own_places(trajectories)]
        rows = self._rows(own, with_routing=False)
        scores, routes = self.trainer.score_and_route(rows, temperature=self.temperature)
        if self.routing is not None:  # The engine's type, so that rows of both can be joined.
            routes = [ids.to(self.routing.dtype) for ids in routes]
        own_routes = trajectory_values(rows, routes, len(own))
        values = self._joined(response_values(rows, scores, own), own, trajectories)
        return values, self._joined_routes(own_routes, trajectories)

    def _joined(
        self, values: Tensor, own: Sequence[TensorDict], trajectories: Sequence[TensorDict]
    ) -> Tensor:
        """Values of the response tokens of all, end to end, from those of this rank's part."""
        if self.twins.num_parts == 1:
            return values
        parts = values.split([len(t["response_ids"]) for t in own])
        lengths = [len(t["response_ids"]) for t in trajectories]
        return torch.cat([values[:0], *self.twins.join(parts, trajectories, lengths, values.dtype)])

    def _joined_routes(
        self, own: list[Tensor | None], trajectories: Sequence[TensorDict]
    ) -> list[Tensor | None]:
        if self.twins.num_parts == 1:
            return own
        routing = self.routing
        assert routing is not None, "experts of a model without experts"
        shapes = [
            (num_fed_tokens(t), routing.num_layers, routing.experts_per_token) for t in trajectories
        ]
        none = torch.zeros(0, dtype=routing.dtype)
        flat = [none if ids is None else ids.flatten() for ids in own]
        sizes = [math.prod(shape) for shape in shapes]
        joined = self.twins.join(flat, trajectories, sizes, routing.dtype)
        return [
            ids.view(shape) if len(ids) else None for ids, shape in zip(joined, shapes, strict=True)
        ]

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
