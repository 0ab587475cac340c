"""Reads a run folder for the report, and names everything that should be there and is not.

Needs no study file: config.json, metrics.jsonl, cuts.jsonl and slots.jsonl are all it looks at.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollverify.metrics.json_lines import CUTS_FILE, SLOTS_FILE
from rollverify.metrics.recorder import METRICS_FILE
from rollverify.study.status import GREEDY_KEY

CONFIG_FILE = "config.json"

STEP_KEYS = (
    "reward/mean",
    "train/entropy_nats",
    "train/num_tokens",
    "rollout/decode_steps",
    "rollout/idle_slot_steps",
    "rollout/engine_busy_frac",
    "rollout/num_tokens",
    "rollout/response_tokens_mean",
    "ops/trained_sequence_mean",
    "staleness/trained_mean",
    "tokens/trained",
    "time/rollout_s",
    "time/train_s",
    "time/verify_s",
    "time/sync_s",
    "time/step_s",
)
"""What the report reads of every step of every method."""

VERIFICATION_KEYS = ("verification/acceptance_rate", "verification/cuts_segment")
"""What it reads of the steps in which unfinished responses are verified."""


@dataclass(kw_only=True)
class RunRecord:
    """What one run has left behind."""

    arm: str
    seed: int
    folder: Path | None
    config: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Values by table and key; empty where config.json is missing."""
    steps: list[dict[str, float]] = field(default_factory=list)
    """Records of the training steps, ascending; a value that was not finite is left out."""
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    """Records with evaluation metrics by step; 0 is the base model."""
    cuts: list[dict[str, Any]] = field(default_factory=list)
    """Lines of the audit log."""
    slots: list[dict[str, Any]] = field(default_factory=list)
    """Lines of the slot log."""
    missing: list[str] = field(default_factory=list)
    """What should be there and is not, in words."""

    @property
    def name(self) -> str:
        """Arm and seed, for messages."""
        return f"{self.arm}, seed {self.seed}"

    @property
    def num_steps(self) -> int:
        """Steps that the run was to take; 0 if unknown."""
        return int(self.setting("training.steps") or 0)

    def setting(self, key: str) -> Any:
        """A value of the config by dotted key; None if unknown."""
        table, _, name = key.partition(".")
        return self.config.get(table, {}).get(name)


def read_run(arm: str, seed: int, folder: Path | None) -> RunRecord:
    """Read what a run has left behind.

    Args:
        arm: name of the arm.
        seed: of the run.
        folder: the run folder; None where there is none.

    Returns:
        The record; whatever is missing is named in it, and nothing raises.
    """
    record = RunRecord(arm=arm, seed=seed, folder=folder)
    if folder is None:
        record.missing.append("there is no run folder")
        return record
    try:
        record.config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        record.missing.append(f"{CONFIG_FILE} is missing or damaged")
    lines = _lines(folder / METRICS_FILE, record)
    record.steps = sorted(
        (_finite(line) for line in lines if line["step"] > 0), key=lambda line: line["step"]
    )
    record.evaluations = {int(line["step"]): _finite(line) for line in lines if GREEDY_KEY in line}
    is_verified = record.setting("method.name") == "rollverify"
    if is_verified:
        record.cuts = _lines(folder / CUTS_FILE, record)
    record.slots = _lines(folder / SLOTS_FILE, record)
    _name_missing_steps(record)
    _name_missing_values(record)
    return record


def _lines(file: Path, record: RunRecord) -> list[dict[str, Any]]:
    if not file.is_file():
        record.missing.append(f"{file.name} is missing")
        return []
    found: list[dict[str, Any]] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            record.missing.append(f"line {number} of {file.name} is damaged")
    return found


def _finite(line: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in line.items() if value is not None}


def _name_missing_steps(record: RunRecord) -> None:
    present = {int(step["step"]) for step in record.steps}
    lacking = [step for step in range(1, record.num_steps + 1) if step not in present]
    if lacking:
        record.missing.append(f"{_ranges(lacking)} of {record.num_steps} not logged")
    if record.setting("evaluation.enable") is False:
        record.missing.append("evaluation is off, so there is no accuracy")
        return
    for step, what in ((0, "the evaluation of the base model"), (record.num_steps, "the final")):
        if step not in record.evaluations and (step or present):
            noun = what if step == 0 else f"{what} evaluation, after step {step},"
            record.missing.append(f"{noun} is missing")


def _name_missing_values(record: RunRecord) -> None:
    for key in STEP_KEYS:
        lacking = [int(step["step"]) for step in record.steps if key not in step]
        if lacking:
            record.missing.append(f"{key} is missing or not finite in {_ranges(lacking)}")
    if record.setting("method.name") != "rollverify":
        return
    for key in VERIFICATION_KEYS:
        lacking = [int(step["step"]) for step in record.steps if key not in step]
        if lacking:
            record.missing.append(f"{key} is missing in {_ranges(lacking)}")


def _ranges(steps: list[int]) -> str:
    """[3, 4, 5, 9] -> "steps 3-5, 9"."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1].append(step)
        else:
            parts.append([step])
    words = [str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts]
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(words)
