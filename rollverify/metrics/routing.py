"""What routing replay does: how far engine and trainer would differ without it, and what it costs.

Runs at AFTER_ROLLOUT and AFTER_TRAIN on models with experts. Changes no trajectory.
"""

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from rollverify.engine.generation import GenerationStats
from rollverify.hooks import StepState
from rollverify.ranks import reduce_metrics
from rollverify.rollout.layout import flat
from rollverify.rollout.trajectory import ROUTING
from rollverify.training.scoring import TrajectoryScorer


class Rollouter(Protocol):
    """What is read of the rollouter."""

    @property
    def stats(self) -> GenerationStats:
        """Of the last phase."""
        ...


class NativeMismatch:
    """Hook: now and then scores F_k without replay, before the step."""

    def __init__(
        self,
        *,
        scorer: TrajectoryScorer,
        every_steps: int,
        data_group: dist.ProcessGroup | None,
    ) -> None:
        """Set up.

        Args:
            scorer: scores under the trainer's weights, the router choosing.
            every_steps: steps between two measurements, >= 1.
            data_group: ranks that hold different trajectories; None where there is one.
        """
        self._scorer = scorer
        self._every_steps = every_steps
        self._data_group = data_group

    def __call__(self, state: StepState) -> None:
        """Fill `mismatch/native_*` from tokens of this version in the loss.

        Collective: yes, over the world.
        """
        if (state.step - 1) % self._every_steps:
            return
        own = self._scorer.score(state.finished)
        gaps = (own - flat(state.finished, "behavior_logprobs")).abs()
        is_new = flat(state.finished, "policy_version") == state.policy_version
        gaps = gaps[is_new & flat(state.finished, "loss_mask")]
        sums = {"gap": gaps.double().sum().item(), "num": float(len(gaps))}
        maxima = {"mismatch/native_abs_max": gaps.max().item() if len(gaps) else 0.0}
        if self._data_group is not None:
            sums, maxima = reduce_metrics(sums, maxima, self._data_group)
        state.metrics |= maxima
        state.metrics["mismatch/native_abs_mean"] = sums["gap"] / max(1.0, sums["num"])


class RoutingStats(Protocol):
    """What the trainer counted over the passes with gradient since it was last asked."""

    @property
    def layers(self) -> Sequence[int]:
        """Absolute indices of the M layers with experts."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens fed, on this rank."""
        ...

    @property
    def changed_L(self) -> Tensor:
        """[M] int64; tokens that the router would have sent to other experts."""
        ...

    @property
    def load_LE(self) -> Tensor:
        """[M, E] int64; tokens of each expert."""
        ...


class Trainer(Protocol):
    """What is read of the policy trainer."""

    def take_routing_stats(self) -> RoutingStats | None:
        """Of this rank; None where no pass was run."""
        ...


class RoutingMetrics:
    """Hook: fills `routing/` after the optimizer step."""

    def __init__(
        self,
        *,
        trainer: Trainer,
        rollouter: Rollouter,
        data_group: dist.ProcessGroup | None,
    ) -> None:
        """Set up.

        Args:
            trainer: counts what its router did.
            rollouter: counts what changed in resumed contexts.
            data_group: ranks that hold different trajectories; None where there is one.
        """
        self._trainer = trainer
        self._rollouter = rollouter
        self._data_group = data_group

    def __call__(self, state: StepState) -> None:
        """Reduce over ranks. Collective: yes, over the data ranks."""
        stats, resumed = self._trainer.take_routing_stats(), self._rollouter.stats
        routed = [one for one in state.finished if ROUTING in one]
        sums = {
            "held": float(resumed.num_held_rows),
            "changed": float(resumed.num_changed_rows),
            "bytes": float(sum(_num_bytes(one) for one in routed)),
            "rows": float(sum(len(one[ROUTING]) for one in routed)),
        }
        if stats is not None:
            sums["tokens"] = float(stats.num_tokens)
            for layer, changed, load in zip(
                stats.layers, stats.changed_L.tolist(), stats.load_LE.tolist(), strict=True
            ):
                sums[f"changed {layer}"] = float(changed)
                sums |= {f"load {layer} {e}": float(number) for e, number in enumerate(load)}
        if self._data_group is not None:
            sums, _ = reduce_metrics(sums, {}, self._data_group)
        state.metrics["routing/reprefill_changed_frac"] = sums["changed"] / max(1.0, sums["held"])
        state.metrics["routing/bytes_per_token"] = sums["bytes"] / max(1.0, sums["rows"])
        if stats is not None:
            state.metrics |= _from_stats(sums, stats.layers, stats.load_LE.shape[1])


def _from_stats(
    sums: dict[str, float], layers: Sequence[int], num_experts: int
) -> dict[str, float]:
    tokens = max(1.0, sums["tokens"])
    metrics: dict[str, float] = {}
    changed_fracs, imbalances = [], []
    for layer in layers:
        load = [sums[f"load {layer} {expert}"] for expert in range(num_experts)]
        changed_fracs.append(sums[f"changed {layer}"] / tokens)
        imbalances.append(max(load) * num_experts / max(1.0, sum(load)))
        metrics[f"routing/changed_layer_{layer}_frac"] = changed_fracs[-1]
        metrics[f"routing/load_layer_{layer}_max"] = imbalances[-1]
    metrics["routing/changed_frac"] = sum(changed_fracs) / len(layers)
    metrics["routing/load_max"] = max(imbalances)
    return metrics


def _num_bytes(trajectory: TensorDict) -> int:
    routing = trajectory[ROUTING]
    return routing.numel() * routing.element_size()
