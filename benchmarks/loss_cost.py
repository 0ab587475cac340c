"""Share of the loss math in the train phase: `python -m benchmarks.loss_cost`.

Whole train steps of the default job's shapes on the base model, and the objective's part of them
alone: from given log-probs to the loss and back to their gradient, with all diagnostics. The two
take turns. A scoring pass that an objective needs is in its step only.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.folders import prepared_base
from benchmarks.isolated import answer, child_task, measure, report
from rollverify.config.losses import (
    LOSSES,
    DecoupledPpo,
    DrGrpo,
    Grpo,
    Masked,
    NoCorrection,
    Reinforce,
)

TARGET = 0.02
GROUPS, GROUP_SIZE, LONGEST, MEAN_TOKENS = 32, 8, 352, 90
"""The default job: 32 prompts, 8 responses each; lengths like those of its base model."""

OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"loss": DrGrpo()},
    **{
        name: {"loss": LOSSES[name](denominator="behavior"), "correction": NoCorrection()}
        for name in ("gspo", "gspo_token", "sapo", "vespo", "cispo", "m2po")
    },
    "decoupled_ppo": {"loss": DecoupledPpo(), "correction": NoCorrection()},
    "reinforce": {"loss": Reinforce()},
    "grpo + sequence mask": {"correction": Masked(level="sequence")},
    "grpo + entropy": {"loss": Grpo(entropy_coefficient=0.01)},
}


def random_batch(vocab_size: int) -> list[Any]:
    """Finished trajectories with random tokens; every other one has an older first half."""
    import torch

    from rollverify.rollout.trajectory import Status, append_segment, new_trajectory, set_outcome

    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(GROUPS * GROUP_SIZE):
        group, sample = divmod(index, GROUP_SIZE)
        uniform = torch.rand((), generator=generator).clamp(min=1e-6)
        size = int(min(LONGEST, 2 - MEAN_TOKENS * uniform.log().item()))
        ids = torch.randint(2, vocab_size, (24 + size,), generator=generator).tolist()
        logprobs = (-2 * torch.rand(size, generator=generator)).tolist()
        one = new_trajectory(
            prompt_ids=ids[:24], group_id=group, prompt_index=group, sample_index=sample
        )
        half = size // 2 if index % 2 else 0
        for version, part in enumerate((slice(0, half), slice(half, size))):
            append_segment(one, ids[24:][part], logprobs[part], policy_version=version, seed=0)
        set_outcome(one, Status.STOP, float(sample % 2))
        made.append(one)
    return made


def base_trainer(base: str, scratch: str) -> Any:
    """The policy trainer on one rank; its learning rate is 0, so every step sees the same model."""
    from torchtitan_ext.trainer_config import TrainerSettings, build_policy_trainer

    settings = TrainerSettings(
        model_folder=base,
        run_folder=scratch,
        steps=1000,
        max_sequence_tokens=LONGEST + 32,
        lr=0.0,
        betas=(0.9, 0.95),
    )
    trainer = build_policy_trainer(settings)
    trainer.checkpointer.load()
    return trainer


def time_objective(words: dict[str, Any], batch: list[Any], repeats: int, **common: Any) -> Any:
    """Seconds of whole steps and of their loss math.

    Returns:
        "step_s" and "loss_s", a list each, and the number of "rows".
    """
    import torch

    from rollverify.losses.objective import Objective
    from rollverify.training.policy_update import PolicyUpdate
    from rollverify.training.step_metrics import StepSums

    objective = Objective(**words)
    update = PolicyUpdate(objective=objective, **common)
    (minibatch,) = update._scored(update._minibatches(batch, 1))
    minibatch = update._with_whole(minibatch, is_first=True)
    given = [torch.rand_like(row.loss.behavior_logprobs).sub_(2.0) for row in minibatch.rows]
    times: dict[str, Any] = {"step_s": [], "loss_s": [], "rows": len(given)}
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        update.train_step(batch, 1)
        between = time.perf_counter()
        sums = StepSums()
        for row, values in zip(minibatch.rows, given, strict=True):
            leaf = values.clone().requires_grad_()
            result = objective.row_loss(row.loss, leaf, -values, minibatch.normalizer)
            sums.add_row(result)
            result.loss.backward()
        if repeat:  # The first turn warms up.
            times["step_s"].append(between - start)
            times["loss_s"].append(time.perf_counter() - between)
    return times


def measure_objectives(task: dict[str, Any]) -> dict[str, Any]:
    """Time every objective.

    Args:
        task: "base" folder, "scratch" folder, "repeats", "micro_batch_tokens".

    Returns:
        "objectives": what `time_objective` gives by name; "tokens" in the loss.
    """
    from rollverify.config.tables import TrainingConfig
    from rollverify.losses.advantages import CreditRule
    from rollverify.ranks import Ranks

    batch = random_batch(vocab_size=80)
    common: dict[str, Any] = {
        "trainer": base_trainer(task["base"], task["scratch"]),
        "credit": CreditRule(max_response_tokens=LONGEST),
        "training": TrainingConfig(micro_batch_tokens=task["micro_batch_tokens"]),
        "temperature": 1.0,
        "ranks": Ranks(),
    }
    results = {
        name: time_objective(words, batch, task["repeats"], **common)
        for name, words in OBJECTIVES.items()
    }
    return {"objectives": results, "tokens": sum(int(one["loss_mask"].sum()) for one in batch)}


def main() -> None:
    """Measure and print the table."""
    task = child_task()
    if task is not None:
        answer(measure_objectives(task))
    parser = argparse.ArgumentParser(description="Share of the loss math in the train phase.")
    parser.add_argument("--base", type=Path, help="base folder; made on first use without it")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--output", type=Path, help="JSON file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(
            "benchmarks.loss_cost",
            {
                "base": str(prepared_base(arguments.base).resolve()),
                "scratch": scratch,
                "repeats": arguments.repeats,
                "micro_batch_tokens": arguments.micro_batch_tokens,
            },
        )
    rows = [["objective", "train step", "loss math", "share"]]
    for name, one in result["objectives"].items():
        step, loss = statistics.median(one["step_s"]), statistics.median(one["loss_s"])
        rows.append([name, f"{step:.3f} s", f"{1e3 * loss:.1f} ms", f"{loss / step:.2%}"])
    num_rows = result["objectives"]["grpo"]["rows"]
    print(f"{result['tokens']} loss tokens in {num_rows} rows; target: share < {TARGET:.0%}")
    report(rows, result, arguments.output)


if __name__ == "__main__":
    main()
