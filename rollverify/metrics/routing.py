"""What routing replay does: how far engine and trainer would differ without it, and what it costs.

Runs at AFTER_ROLLOUT and AFTER_TRAIN on models with experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensordict import TensorDict

from rollverify.hooks import StepState
from rollverify.ranks import Ranks
from rollverify.rollout.layout import flat
from rollverify.rollout.rollouter import Rollouter
from rollverify.rollout.trajectory import ROUTING, num_rows
from rollverify.training.scoring import TrajectoryScorer

if TYPE_CHECKING:
    from torchtitan_ext.policy_trainer import PolicyTrainer


@dataclass(kw_only=True)
class NativeMismatch:
    """Hook: every so many steps scores F_k without replay, before the step."""

    scorer: TrajectoryScorer
    """Under the trainer's weights, the router choosing."""

    every_steps: int
    ranks: Ranks

    def __call__(self, state: StepState) -> None:
        """Fill `mismatch/native_*` from tokens of this version in the loss. Collective."""
        if (state.step - 1) % self.every_steps:
            return
        own = self.scorer.score(state.finished)
        gaps = (own - flat(state.finished, "behavior_logprobs")).abs()
        is_new = flat(state.finished, "policy_version") == state.policy_version
        gaps = gaps[is_new & flat(state.finished, "loss_mask")]
        sums = {"gap": gaps.double().sum().item(), "num": float(len(gaps))}
        maxima = {"mismatch/native_abs_max": gaps.max().item() if len(gaps) else 0.0}
        sums, maxima = self.ranks.reduce(sums, maxima)
        state.metrics |= maxima
        state.metrics["mismatch/native_abs_mean"] = sums["gap"] / max(1.0, sums["num"])


@dataclass(kw_only=True)
class RoutingMetrics:
    """Hook: fills `routing/` after the optimizer step."""

    trainer: "PolicyTrainer"
    """Counts what its router did."""

    rollouter: Rollouter
    """Counts what changed in resumed contexts."""

    ranks: Ranks
    """With different responses."""

    data_ranks: Ranks
    """That train on different ones."""

    def __call__(self, state: StepState) -> None:
        """Reduce over ranks. Collective."""
        stats, resumed = self.trainer.take_routing_stats(), self.rollouter.stats
        routed = [t for t in state.finished if ROUTING in t]
        sums = {
            "held": float(resumed.num_held_rows),
            "changed": float(resumed.num_changed_rows),
            "bytes": float(sum(map(_num_bytes, routed))),
            "rows": float(sum(map(num_rows, routed))),
        }
        sums = self.ranks.sum(sums)
        state.metrics["routing/reprefill_changed_frac"] = sums["changed"] / max(1.0, sums["held"])
        state.metrics["routing/bytes_per_token"] = sums["bytes"] / max(1.0, sums["rows"])
        if stats is None:
            return
        trained = {"tokens": float(stats.num_tokens)}
        for layer, changed, load in zip(
            stats.layers, stats.changed_L.tolist(), stats.load_LE.tolist(), strict=True
        ):
            trained[f"changed {layer}"] = float(changed)
            trained |= {f"load {layer} {e}": float(number) for e, number in enumerate(load)}
        trained = self.data_ranks.sum(trained)
        state.metrics |= _from_stats(trained, stats.layers, stats.load_LE.shape[1])


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
