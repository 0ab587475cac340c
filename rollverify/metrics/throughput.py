"""Speed, memory, sync and verification figures of an iteration. Runs at AFTER_WEIGHT_SYNC."""

from dataclasses import dataclass, field
from pathlib import Path

from rollverify.engine.memory import GIB
from rollverify.engine.weight_sync import WeightSync
from rollverify.hooks import StepState, hook_time_key
from rollverify.metrics.gpu import GpuFigures
from rollverify.ranks import Ranks
from rollverify.rollout.trajectory import num_fed_tokens

PAGE_BYTES = 4096
SCORING_HOOKS = ("anchor_scoring", "packing_noise")
"""Hooks of the rollout phase that generate nothing."""


def resident_gib() -> float:
    """Resident memory of this process in GiB; 0 where the kernel does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0.0
    return pages * PAGE_BYTES / GIB


@dataclass(kw_only=True)
class Throughput:
    """Hook: tokens per second of the two long phases, parity of the sync, memory."""

    weight_sync: WeightSync
    gpu: GpuFigures | None = None
    """None on CPUs."""

    num_twins: int = 1
    """Ranks that hold the same trajectories."""

    engine_ranks: int = 1
    """That hold one engine together."""

    _preemptions: int = field(default=0, init=False)

    def __call__(self, state: StepState) -> None:
        """Add the figures. Collective over the world."""
        preemptions = self.weight_sync.engine.num_preemptions
        new, self._preemptions = preemptions - self._preemptions, preemptions
        work = self.gpu.work(map(num_fed_tokens, state.finished)) if self.gpu else 0.0
        sums, maxima = Ranks.world().reduce(
            {"rollout/preemptions": new / self.engine_ranks, "work": work},
            {
                "memory/rss_gib": resident_gib(),
                "sync/parity_abs_max": self.weight_sync.parity_abs_max,
                "sync/push_s": self.weight_sync.push_s,
                **(self.gpu.take() if self.gpu else {}),
            },
        )
        metrics = state.metrics
        work = sums.pop("work") / self.num_twins
        metrics |= sums | maxima
        hooks_s = (metrics.get(hook_time_key(name), 0.0) for name in SCORING_HOOKS)
        rollout_s = state.phase_s["rollout"] - sum(hooks_s)
        metrics["rollout/tokens_per_s"] = metrics["rollout/num_tokens"] / rollout_s
        metrics["train/tokens_per_s"] = metrics["train/num_tokens"] / state.phase_s["train"]
        if self.gpu is not None:
            metrics["train/mfu"] = self.gpu.utilisation(work, state.phase_s["train"])
        metrics["progress/policy_version"] = state.policy_version
        if "verification/scoring_s" in metrics:
            self._add_verification(state)

    def _add_verification(self, state: StepState) -> None:
        """Cost of scoring and verification, over the step without evaluation and checkpoints."""
        metrics, phase_s = state.metrics, state.phase_s
        anchor_s = metrics.get(hook_time_key("anchor_scoring"), 0.0)
        step_s = sum(phase_s[name] for name in ("rollout", "train", "verify"))
        step_s += self.weight_sync.push_s
        metrics["verification/scoring_s"] += anchor_s
        metrics["verification/step_frac"] = (anchor_s + phase_s["verify"]) / step_s
