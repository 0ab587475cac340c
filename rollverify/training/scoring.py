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
    """ComputeProb of RollVerify Algorithm 1, over trajectories packed into rows.

    Prompts are context only. A trajectory without a response costs nothing. Both methods are
    collective over the world, also for a rank that has nothing to score.
    """

    trainer: "PolicyTrainer"
    micro_batch_tokens: int
    """Tokens of the packed rows that are scored at the same time."""
    temperature: float
    """Of sampling; log-probs are taken under it."""
    ranks: Ranks
    routing: RoutingShape | None = None
    """Of the model, where recorded experts are replayed; None where none are."""

    def score(self, trajectories: Sequence[TensorDict]) -> Tensor:
        """[N] float32 nats on the CPU; the response tokens of all trajectories end to end.

        Raises:
            RolloutError: if experts are to be replayed and a token's were not recorded.
        """
        rows = self._rows(trajectories, with_routing=self.routing is not None)
        scores = self.trainer.score(rows, temperature=self.temperature)
        return response_values(rows, scores, trajectories)

    def score_and_route(
        self, trajectories: Sequence[TensorDict]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Score with the router's own choice, and say what it was (routing replay R2).

        Returns:
            ([N] as by `score`; per trajectory the expert ids of its F fed tokens, [F, L, K] on the
            CPU, None for an empty response).
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
    """Make sure that every response token has a number.

    Args:
        values: [N] floats; the trajectories' response tokens end to end.
        trajectories: whose tokens they are.
        name: of the values, for the message.

    Raises:
        RolloutError: naming group, sample and token of the first value that is not finite.
    """
    bad = (~values.isfinite()).nonzero()
    if len(bad):
        token, layout = int(bad[0]), response_layout(trajectories)
        owner = int(layout.token_owners[token])
        raise RolloutError(
            f"{name_of(trajectories[owner])}: {name} of response token "
            f"{token - int(layout.trajectory_starts[owner])} is {values[token].item()}, "
            "must be finite"
        )
