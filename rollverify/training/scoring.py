"""Log-probs of responses under the trainer's weights now, trajectory by trajectory.

Does not decide what is scored or what the scores are for. Prompts are context only: their tokens
are fed but have no score.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from rollverify.engine.model_folder import RoutingShape
from rollverify.errors import RolloutError
from rollverify.rollout.trajectory import name_of
from rollverify.training.packing import (
    PackedRow,
    fill_rows,
    pack_for_scoring,
    response_values,
    trajectory_values,
)


class Scorer(Protocol):
    """What scoring needs of the policy trainer."""

    device: torch.device

    @property
    def rows_at_once(self) -> int:
        """Rows that `score` works on at the same time, all of which take memory."""
        ...

    def score(self, rows: Sequence[PackedRow], *, temperature: float) -> list[Tensor]:
        """Log-probs of each row's targets, [T] float32 nats; collective."""
        ...

    def score_and_route(
        self, rows: Sequence[PackedRow], *, temperature: float
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The same, and the router's own choice per row, [T, L, K] ids; collective."""
        ...


class TrajectoryScorer:
    """Scores whatever trajectories it is given, packed into rows of bounded length."""

    def __init__(
        self,
        *,
        trainer: Scorer,
        micro_batch_tokens: int,
        temperature: float,
        data_group: dist.ProcessGroup | None,
        routing: RoutingShape | None = None,
    ) -> None:
        """Set up.

        Args:
            trainer: holds the sharded policy.
            micro_batch_tokens: tokens of the packed rows that are scored at the same time.
            temperature: of sampling; log-probs are taken under it.
            data_group: ranks that hold different trajectories; None where there is one.
            routing: of the model, where recorded experts are replayed; None where none are.
        """
        self._routing = routing
        self._trainer = trainer
        self._micro_batch_tokens = micro_batch_tokens
        self._temperature = temperature
        self._data_group = data_group

    def score(self, trajectories: Sequence[TensorDict]) -> Tensor:
        """Score the responses under the weights the trainer holds now.

        A trajectory without a response costs nothing. A rank with less than the others, or with
        nothing, runs rows that belong to no trajectory, since all ranks take part in each pass.

        Args:
            trajectories: B of them; left as they are.

        Returns:
            [N] float32 nats on the CPU; the response tokens of all trajectories end to end.

        Raises:
            RolloutError: if experts are to be replayed and a token's were not recorded.

        Source:
            RollVerify Algorithm 1 (ComputeProb); collective: yes, over the world.
        """
        rows = self._rows(trajectories, with_routing=self._routing is not None)
        scores = self._trainer.score(rows, temperature=self._temperature)
        return response_values(rows, scores, trajectories)

    def score_and_route(
        self, trajectories: Sequence[TensorDict]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Score with the router's own choice, and say what it was.

        Args:
            trajectories: B of them; left as they are.

        Returns:
            ([N] scores as by `score`; B tensors of ids, [F, L, K] for the F fed tokens of prompt
            and response, on the CPU; None for an empty response).

        Source:
            Routing replay from the trainer's own pass (R2); collective: yes, over the world.
        """
        rows = self._rows(trajectories, with_routing=False)
        scores, routes = self._trainer.score_and_route(rows, temperature=self._temperature)
        if self._routing is not None:  # The engine's type, so that rows of both can be joined.
            routes = [ids.to(self._routing.dtype) for ids in routes]
        own_routes = trajectory_values(rows, routes, len(trajectories))
        return response_values(rows, scores, trajectories), own_routes

    def _rows(self, trajectories: Sequence[TensorDict], *, with_routing: bool) -> list[PackedRow]:
        rows = pack_for_scoring(
            trajectories,
            self._micro_batch_tokens,
            rows_at_once=self._trainer.rows_at_once,
            with_routing=with_routing,
        )
        if self._data_group is None:
            return rows
        routing = self._routing if with_routing else None
        return fill_rows(rows, self._data_group, self._trainer.device.type, routing)


def check_finite(values: Tensor, trajectories: Sequence[TensorDict], name: str) -> None:
    """Make sure that every response token has a number.

    Args:
        values: [N] floats; the trajectories' response tokens end to end.
        trajectories: whose tokens they are.
        name: what the values are, for the message.

    Raises:
        RolloutError: naming group, sample and token of the first value that is not finite.
    """
    is_bad = ~values.isfinite()
    if not bool(is_bad.any()):
        return
    place = token = int(is_bad.nonzero()[0])
    for trajectory in trajectories:
        size = len(trajectory["response_ids"])
        if place < size:
            raise RolloutError(
                f"{name_of(trajectory)}: {name} of response token {place} is "
                f"{values[token].item()}, must be finite"
            )
        place -= size
    raise RolloutError(f"{name} holds more values than there are response tokens")
