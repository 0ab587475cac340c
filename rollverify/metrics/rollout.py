"""Rewards, lengths and text samples of the trajectories an iteration trains on; slots in use.

Runs at AFTER_ROLLOUT on every rank.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from tensordict import TensorDict

from rollverify.config.tables import MetricsConfig
from rollverify.hooks import StepState
from rollverify.losses.advantages import count_zero_signal_groups
from rollverify.metrics.json_lines import SlotLog
from rollverify.ranks import Ranks
from rollverify.rollout.rollouter import Rollouter
from rollverify.rollout.trajectory import Status, stacked

logger = logging.getLogger(__name__)

FIRST_STEPS, NEARLY_ALL = 3, 0.95
"""Steps in which a warning says that so many responses reach the limit."""


def distribution(prefix: str, values: Sequence[int]) -> dict[str, float]:
    """`<prefix>_mean`, `_p50`, `_p95` and `_max` of counts, linearly interpolated; {} of none."""
    if not values:
        return {}
    ordered = sorted(values)
    return {
        f"{prefix}_mean": sum(ordered) / len(ordered),
        f"{prefix}_p50": _percentile(ordered, 0.50),
        f"{prefix}_p95": _percentile(ordered, 0.95),
        f"{prefix}_max": float(ordered[-1]),
    }


def _percentile(ordered: Sequence[int], share: float) -> float:
    rank = share * (len(ordered) - 1)
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (rank - below) * (ordered[above] - ordered[below])


@dataclass(kw_only=True)
class RolloutMetrics:
    """Hook: fills `reward/` and `rollout/` of the step's metrics, writes text samples."""

    rollouter: Rollouter
    decode: Callable[[Sequence[int]], str]
    log_text: Callable[[str, str, int], None]
    """Takes tag, text and step."""

    metrics: MetricsConfig
    epoch: Callable[[], int]
    ranks: Ranks

    grading_counts: Callable[[], dict[str, int]] = dict
    """Gradings by kind since the last call that say nothing of the response."""

    def __call__(self, state: StepState) -> None:
        """Reduce over ranks and write. Collective."""
        finished = state.finished
        rewards = stacked(finished, "reward")
        lengths = [len(t["response_ids"]) for t in finished]
        truncated = int((stacked(finished, "status") == int(Status.LENGTH)).sum())
        stats = self.rollouter.stats
        maxima = {"rollout/decode_steps": float(stats.num_steps)}
        sums = {
            "num": float(len(finished)),
            "reward": rewards.sum().item(),
            "right": float((rewards > 0).sum().item()),
            "reward_squared": rewards.double().square().sum().item(),
            "truncated": float(truncated),
            "zero_signal": float(
                count_zero_signal_groups(rewards, stacked(finished, "group_id")) if finished else 0
            ),
            "unfinished": float(len(state.unfinished)),
            "tokens": float(stats.num_tokens),
            "slot_steps": float(stats.slot_steps),
            "capacity": float(stats.capacity),
            "lost": float(stats.num_lost),
            "resumed": float(stats.num_resumed),
            "tokens_resumed": float(stats.tokens_resumed),
            "started": float(stats.num_started),
            "groups": float(len({int(t["group_id"]) for t in finished})),
        }
        given_up = self.rollouter.given_up
        if given_up is not None:
            sums["groups_given_up"] = float(given_up.num_groups)
            sums["num_given_up"] = float(given_up.num_trajectories)
            sums["reward_given_up"] = given_up.reward
        counts = self.grading_counts()
        sums |= {f"grading_{kind}": float(number) for kind, number in counts.items()}
        sums, maxima = self.ranks.reduce(sums, maxima)
        lengths = list(chain.from_iterable(self.ranks.gather(lengths)))
        state.metrics |= self._from_sums(sums) | maxima
        self._warn_of_limit(state)
        if given_up is not None:
            state.metrics |= _with_given_up(sums)
        if counts:
            state.metrics |= {
                "reward/grading_errors": sums["grading_error"],
                "reward/timeouts": sums["grading_timeout"],
                "reward/gold_unreadable": sums["grading_gold_unreadable"],
            }
        state.metrics |= distribution("rollout/response_tokens", lengths)
        state.metrics["progress/epoch"] = self.epoch()
        num_samples = self.metrics.text_samples
        if num_samples and (state.step - 1) % self.metrics.text_samples_every == 0:
            self._write_samples(finished[:num_samples], state.step)

    def _warn_of_limit(self, state: StepState) -> None:
        """A model that stops at another token than the run knows fills every response."""
        share = state.metrics["rollout/truncated_frac"]
        if state.step <= FIRST_STEPS and share >= NEARLY_ALL and self.ranks.rank == 0:
            logger.warning(
                "step %d: %.0f %% of the responses reached rollout.max_response_tokens; if the "
                "model does end its texts, add the token it ends them with to "
                "rollout.stop_token_ids",
                state.step,
                100 * share,
            )

    @staticmethod
    def _from_sums(sums: dict[str, float]) -> dict[str, float]:
        num = max(1.0, sums["num"])
        mean = sums["reward"] / num
        return {
            "reward/mean": mean,
            "reward/accuracy": sums["right"] / num,
            "reward/std": max(0.0, sums["reward_squared"] / num - mean**2) ** 0.5,
            "rollout/num_finished": sums["num"],
            "rollout/num_unfinished": sums["unfinished"],
            "rollout/truncated_frac": sums["truncated"] / num,
            "rollout/zero_signal_groups": sums["zero_signal"],
            "rollout/num_tokens": sums["tokens"],
            "rollout/tokens_lost_at_pause": sums["lost"],
            "rollout/num_resumed": sums["resumed"],
            "rollout/tokens_resumed": sums["tokens_resumed"],
            "rollout/num_started": sums["started"],
            "rollout/idle_slot_steps": sums["capacity"] - sums["slot_steps"],
            "rollout/engine_busy_frac": sums["slot_steps"] / max(1.0, sums["capacity"]),
        }

    def _write_samples(self, trajectories: list[TensorDict], step: int) -> None:
        parts = []
        for trajectory in trajectories:
            prompt = self.decode(trajectory["prompt_ids"].tolist())
            response = self.decode(trajectory["response_ids"].tolist())
            parts.append(f"reward {trajectory['reward'].item():g}\n{prompt}{response}")
        self.log_text("samples/responses", "\n\n".join(parts), step)


def _with_given_up(sums: dict[str, float]) -> dict[str, float]:
    """Metrics over the groups trained on and those given up, each once: dropping biases neither."""
    num_groups = sums["groups"] + sums["groups_given_up"]
    num = max(1.0, sums["num"] + sums["num_given_up"])
    return {
        "rollout/groups_given_up": sums["groups_given_up"],
        "rollout/signal_frac": (sums["groups"] - sums["zero_signal"]) / max(1.0, num_groups),
        "reward/mean_drawn": (sums["reward"] + sums["reward_given_up"]) / num,
    }


@dataclass(kw_only=True)
class SlotTrace:
    """Hook: a line of the slot log per phase."""

    rollouter: Rollouter
    slot_log: SlotLog

    def __call__(self, state: StepState) -> None:
        """Write the phase. Collective."""
        own = [len(t["response_ids"]) for t in state.finished]
        parts = self.rollouter.ranks.gather((list(self.rollouter.stats.active), own))
        active, lengths = zip(*parts, strict=True)
        line = {"active": summed(active), "lengths": list(chain.from_iterable(lengths))}
        self.slot_log.write(state.step, [line])


def summed(counts: Sequence[Sequence[int]]) -> list[int]:
    """Counts of each rank by engine step -> of all; a rank that has ended its phase adds 0."""
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]
