"""Run folders as a trainer leaves them, made by hand; imported by the tests of the study."""

import json
from pathlib import Path
from typing import Any

from rollverify.checkpoint.run_folder import write_config
from rollverify.study.plan import PlannedRun, config_of
from rollverify.study.records import RunRecord, read_run
from rollverify.study.study_file import Study, study_from

STEPS = 3
SETTINGS: dict[str, object] = {
    "training.steps": STEPS,
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 2,
    "rollout.oversampling": 2.0,
    "evaluation.num_problems": 100,
    "evaluation.samples_per_problem": 4,
}

STEP = {
    "reward/mean": 0.5,
    "train/entropy_nats": 0.2,
    "train/num_tokens": 40.0,
    "rollout/decode_steps": 10.0,
    "rollout/idle_slot_steps": 60.0,
    "rollout/engine_busy_frac": 0.25,  # of 80 slots 20 were busy: 60 * 0.25 / 0.75
    "rollout/num_tokens": 20.0,
    "rollout/response_tokens_mean": 5.0,
    "ops/trained_sequence_mean": 0.01,
    "staleness/trained_mean": 1.0,
    "tokens/trained": 40.0,
    "tokens/generated": 60.0,
    "tokens/cut": 5.0,
    "tokens/discarded": 2.0,
    "tokens/dropped": 1.0,
    "tokens/held": 12.0,
    "time/rollout_s": 2.5,
    "time/train_s": 1.0,
    "time/verify_s": 0.5,
    "time/sync_s": 1.25,
    "time/step_s": 5.5,
    "time/hook/rollout_metrics_s": 0.25,
    "time/hook/anchor_scoring_s": 0.25,
    "time/hook/verification_s": 0.5,
    "time/hook/evaluation_s": 0.75,
    "time/hook/checkpointing_s": 0.25,
    "verification/scoring_s": 0.5,
    "verification/acceptance_rate": 0.75,
    "verification/tokens_checked": 20.0,
    "verification/cuts_segment": 2.0,
}
"""What every step logs here; the same at each, so that sums are multiples."""


def study(**changes: Any) -> Study:
    """Arms `on_policy` and `rollverify`, seeds 0 and 1."""
    document: dict[str, Any] = {
        "question": "Which?",
        "seeds": [0, 1],
        "baseline": "on_policy",
        "settings": nested(SETTINGS),
        "arms": [
            {"name": "on_policy", "settings": {"method": {"name": "on_policy"}}},
            {"name": "rollverify", "label": "RollVerify"},
        ],
    }
    return study_from(document | changes, "small")


def nested(settings: dict[str, object]) -> dict[str, dict[str, object]]:
    tables: dict[str, dict[str, object]] = {}
    for key, value in settings.items():
        table, _, name = key.partition(".")
        tables.setdefault(table, {})[name] = value
    return tables


def write_run(
    folder: Path,
    settings: dict[str, object] | None = None,
    *,
    num_steps: int = STEPS,
    accuracy: float = 0.75,
    has_final: bool = True,
    later: dict[int, dict[str, float]] | None = None,
    **changes: float | None,
) -> Path:
    """A run folder; `changes` replace values of every step, written with "__" for "/".

    `later` adds values to single steps.
    """
    made = study()
    folder.mkdir(parents=True)
    write_config(folder, config_of(made, made.arms[1], settings))
    step = STEP | {key.replace("__", "/"): value for key, value in changes.items()}
    lines: list[dict[str, Any]] = [{"step": n, **step} for n in range(num_steps + 1)]
    lines[0] = {"step": 0, **evaluation(0.25)}
    if has_final:
        lines[-1] |= evaluation(accuracy)
    for number, values in (later or {}).items():
        lines[number] |= values
    write_lines(folder / "metrics.jsonl", lines)
    write_lines(folder / "cuts.jsonl", [{"step": 1, "rule": rule} for rule in ("segment", "token")])
    slots = [{"step": n, "active": [8, 8, 4], "lengths": [3, 5]} for n in range(1, num_steps + 1)]
    write_lines(folder / "slots.jsonl", slots)
    return folder


def evaluation(mean: float, greedy: float = 0.5) -> dict[str, float]:
    return {"eval/mean_at_4": mean, "eval/greedy_accuracy": greedy, "eval/truncated_frac": 0.125}


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def drop_line(file: Path, number: int) -> None:
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:number] + lines[number + 1 :]))


def own(run: PlannedRun, **changes: object) -> dict[str, object]:
    """Settings of the folder that a planned run of `study` makes."""
    return {"run.name": run.arm, "run.seed": run.seed, "method.name": run.arm, **changes}


def checkpoint(folder: Path, step: int, name: str = ".metadata") -> None:
    (folder / "checkpoints" / f"step-{step}").mkdir(parents=True)
    (folder / "checkpoints" / f"step-{step}" / name).touch()


def records(
    root: Path, accuracies: dict[str, tuple[float, ...]], **changes: Any
) -> list[RunRecord]:
    """Runs of the arms of `study`, one per accuracy; `changes` are those of arm rollverify."""
    found = []
    for arm, values in accuracies.items():
        for seed, accuracy in enumerate(values):
            own_changes = changes if arm == "rollverify" else {}
            settings = {"method.name": arm, "run.seed": seed}
            folder = root / arm / f"seed-{seed}" / arm
            write_run(folder, settings, accuracy=accuracy, **own_changes)
            found.append(read_run(arm, seed, folder))
    return found
