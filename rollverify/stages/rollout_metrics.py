"""Rewards, lengths and text samples of the trajectories an iteration trains on.

Runs at AFTER_ROLLOUT on every rank. Changes no trajectory.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch.distributed as dist
from tensordict import TensorDict

from rollverify.algorithms.advantages import count_zero_signal_groups
from rollverify.metrics.distribution import distribution
from rollverify.metrics.reduction import reduce_metrics
from rollverify.rollout.dynamic_sampling import GivenUp
from rollverify.rollout.generation import GenerationStats
from rollverify.rollout.schema import Status, stacked
from rollverify.state import StepState


class Rollouter(Protocol):
    """What is read of the rollouter."""

    @property
    def stats(self) -> GenerationStats:
        """Of the last phase."""
        ...

    @property
    def given_up(self) -> GivenUp | None:
        """Groups that dynamic sampling gave up in it; None where it is off."""
        ...


class RolloutMetrics:
    """Hook: fills `reward/` and `rollout/` of the step's metrics, writes text samples."""

    def __init__(
        self,
        *,
        rollouter: Rollouter,
        decode: Callable[[Sequence[int]], str],
        log_text: Callable[[str, str, int], None],
        text_samples: int,
        text_samples_every: int,
        epoch: Callable[[], int],
        data_group: dist.ProcessGroup | None,
        grading_counts: Callable[[], dict[str, int]] = dict,
    ) -> None:
        """Set up.

        Args:
            rollouter: gives the stats of its last phase.
            decode: ids -> text.
            log_text: (tag, text, step); writes on rank 0 only.
            text_samples: responses to write each time; 0 writes none.
            text_samples_every: steps between two times.
            epoch: epoch of the prompts just used.
            data_group: ranks that hold different trajectories; None where there is one.
            grading_counts: gradings since the last call that say nothing of the response, by kind;
                {} for rewards that always have a verdict.
        """
        self._rollouter = rollouter
        self._decode = decode
        self._log_text = log_text
        self._text_samples = text_samples
        self._text_samples_every = text_samples_every
        self._epoch = epoch
        self._data_group = data_group
        self._grading_counts = grading_counts

    def __call__(self, state: StepState) -> None:
        """Reduce over ranks and write. Collective: yes, over the data ranks."""
        finished = state.finished
        rewards = stacked(finished, "reward")
        lengths = [len(t["response_ids"]) for t in finished]
        truncated = int((stacked(finished, "status") == int(Status.LENGTH)).sum())
        stats = self._rollouter.stats
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
            "resumed": float(stats.num_resumed),
            "started": float(stats.num_started),
            "groups": float(len({int(one["group_id"]) for one in finished})),
        }
        given_up = self._rollouter.given_up
        if given_up is not None:
            sums["groups_given_up"] = float(given_up.num_groups)
            sums["num_given_up"] = float(given_up.num_trajectories)
            sums["reward_given_up"] = given_up.reward
        counts = self._grading_counts()
        sums |= {f"grading_{kind}": float(number) for kind, number in counts.items()}
        if self._data_group is not None:
            sums, maxima = reduce_metrics(sums, maxima, self._data_group)
            lengths = _all_lengths(lengths, self._data_group)
        state.metrics |= self._from_sums(sums) | maxima
        if given_up is not None:
            state.metrics |= _with_given_up(sums)
        if counts:
            state.metrics |= {
                "reward/grading_errors": sums["grading_error"],
                "reward/timeouts": sums["grading_timeout"],
                "reward/gold_unreadable": sums["grading_gold_unreadable"],
            }
        state.metrics |= distribution("rollout/response_tokens", lengths)
        state.metrics["progress/epoch"] = self._epoch()
        if self._text_samples and (state.step - 1) % self._text_samples_every == 0:
            self._write_samples(finished[: self._text_samples], state.step)

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
            "rollout/num_resumed": sums["resumed"],
            "rollout/num_started": sums["started"],
            "rollout/idle_slot_steps": sums["capacity"] - sums["slot_steps"],
            "rollout/engine_busy_frac": sums["slot_steps"] / max(1.0, sums["capacity"]),
        }

    def _write_samples(self, trajectories: list[TensorDict], step: int) -> None:
        parts = []
        for trajectory in trajectories:
            prompt = self._decode(trajectory["prompt_ids"].tolist())
            response = self._decode(trajectory["response_ids"].tolist())
            parts.append(f"reward {trajectory['reward'].item():g}\n{prompt}{response}")
        self._log_text("samples/responses", "\n\n".join(parts), step)


def _with_given_up(sums: dict[str, float]) -> dict[str, float]:
    """Metrics over the groups trained on and those given up, each once: dropping biases neither."""
    num_groups = sums["groups"] + sums["groups_given_up"]
    num = max(1.0, sums["num"] + sums["num_given_up"])
    return {
        "rollout/groups_given_up": sums["groups_given_up"],
        "rollout/signal_frac": (sums["groups"] - sums["zero_signal"]) / max(1.0, num_groups),
        "reward/mean_drawn": (sums["reward"] + sums["reward_given_up"]) / num,
    }


def _all_lengths(lengths: list[int], group: dist.ProcessGroup) -> list[int]:
    """Response lengths of all ranks of the group. Collective: yes, over the group."""
    gathered: list[list[int]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, lengths, group=group)
    return [length for part in gathered for length in part]
