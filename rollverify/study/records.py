"""Reads a run folder for the report, and names everything that should be there and is not."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rollverify.hooks import hook_time_key
from rollverify.metrics.json_lines import CUTS_FILE, SLOTS_FILE
from rollverify.metrics.recorder import METRICS_FILE
from rollverify.study.status import GREEDY_KEY, read_lines

CONFIG_FILE = "config.json"

STEP_KEYS = (
    "reward/mean", "train/entropy_nats", "train/num_tokens", "rollout/decode_steps",
    "rollout/idle_slot_steps", "rollout/engine_busy_frac", "rollout/num_tokens",
    "rollout/response_tokens_mean", "ops/trained_sequence_mean", "staleness/trained_mean",
    "tokens/trained", "time/rollout_s", "time/train_s", "time/verify_s", "time/sync_s",
    "time/step_s",
)  # fmt: skip
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
    steps: pd.DataFrame = field(default_factory=pd.DataFrame)
    """A row per training step, a column per metric; NaN where it is not there or not finite."""
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    """Metrics of the steps with an evaluation; 0 is the base model."""
    cuts: list[dict[str, Any]] = field(default_factory=list)
    slots: list[dict[str, Any]] = field(default_factory=list)
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

    @property
    def is_complete(self) -> bool:
        """Whether every step is logged."""
        return 0 < self.num_steps == len(self.steps)

    def setting(self, key: str) -> Any:
        """A value of the config by dotted key; None if unknown."""
        table, _, name = key.partition(".")
        return self.config.get(table, {}).get(name)

    def metric(self, key: str) -> pd.Series:
        """A metric by step; NaN where it is missing."""
        return pd.Series(self.steps.get(key, math.nan), self.steps.index, dtype=float)

    def hooks_s(self, *names: str) -> pd.Series:
        """Seconds of some hooks together by step; one that did not run took none."""
        none = pd.Series(0.0, self.steps.index)
        return sum((self.metric(hook_time_key(name)).fillna(0.0) for name in names), start=none)


def read_run(arm: str, seed: int, folder: Path | None) -> RunRecord:
    """Read what a run has left behind; whatever is missing is named in the record."""
    record = RunRecord(arm=arm, seed=seed, folder=folder)
    if folder is None:
        record.missing.append("there is no run folder")
        return record
    try:
        record.config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        record.missing.append(f"{CONFIG_FILE} is missing or damaged")
    lines = _lines(folder / METRICS_FILE, record)
    steps = [line for line in lines if line["step"] > 0]
    if steps:
        record.steps = pd.DataFrame(steps).set_index("step").astype(float).sort_index()
    record.evaluations = {line["step"]: line for line in lines if GREEDY_KEY in line}
    is_verified = record.setting("method.name") == "rollverify"
    if is_verified:
        record.cuts = _lines(folder / CUTS_FILE, record)
    record.slots = _lines(folder / SLOTS_FILE, record)
    _name_missing_steps(record)
    hows = dict.fromkeys(STEP_KEYS, "missing or not finite")
    hows |= dict.fromkeys(VERIFICATION_KEYS if is_verified else (), "missing")
    for key, how in hows.items():
        lacking = [step for step, value in record.metric(key).items() if math.isnan(value)]
        if lacking:
            record.missing.append(f"{key} is {how} in {_ranges(lacking)}")
    return record


def _lines(file: Path, record: RunRecord) -> list[dict[str, Any]]:
    if not file.is_file():
        record.missing.append(f"{file.name} is missing")
    lines, torn = read_lines(file)
    record.missing += [f"line {number} of {file.name} is damaged" for number in torn]
    return lines


def _name_missing_steps(record: RunRecord) -> None:
    last = record.num_steps
    lacking = sorted({*range(1, last + 1)} - {*record.steps.index})
    if lacking:
        record.missing.append(f"{_ranges(lacking)} of {last} not logged")
    if record.setting("evaluation.enable") is False:
        record.missing.append("evaluation is off, so there is no accuracy")
        return
    if len(record.steps) and 0 not in record.evaluations:
        record.missing.append("the evaluation of the base model is missing")
    if last and last not in record.evaluations:
        record.missing.append(f"the final evaluation, after step {last}, is missing")


def _ranges(steps: list[Any]) -> str:
    """[3, 4, 5, 9] -> "steps 3-5, 9"."""
    starts = [step for step in steps if step - 1 not in steps]
    ends = [step for step in steps if step + 1 not in steps]
    pairs = zip(starts, ends, strict=True)
    words = [f"{start}-{end}" if start < end else str(start) for start, end in pairs]
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(words)
