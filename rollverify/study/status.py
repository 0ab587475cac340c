"""How far each planned run is, read from its folder, and the time that is left."""

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rollverify.checkpoint.run_folder import changed_settings
from rollverify.config.tables import Config
from rollverify.errors import ConfigError
from rollverify.metrics.recorder import METRICS_FILE
from rollverify.study.plan import PlannedRun

START_UP_S = 40.0
"""Seconds of a run outside its steps: imports, engine, first evaluation, export."""

GREEDY_KEY = "eval/greedy_accuracy"
PLACES = ("run.output_dir:", "prepare.cache_dir:")
"""Settings that may differ between a run and the plan: they do not change the result."""


class Progress(StrEnum):
    """What is to be done about a run."""

    ABSENT = "not started"  # so is one that was killed before its first checkpoint
    RESUMABLE = "interrupted"  # it goes on from its newest checkpoint
    COMPLETE = "complete"  # metrics of every step and the final evaluation are there


@dataclass(kw_only=True, slots=True, frozen=True)
class RunStatus:
    """How far a run is."""

    progress: Progress = Progress.ABSENT
    folder: Path | None = None
    last_step: int = 0
    """Last step that is logged; what comes after the newest checkpoint is done again."""
    step_s: float | None = None
    """Mean seconds of a step, evaluations included; None before the first."""


def status_of(run: PlannedRun) -> RunStatus:
    """Look at a run's place; a folder made with other settings is a ConfigError.

    Of several run folders a complete one counts, else the newest resumable one, else the newest.
    """
    folders = [path for path in run.place.glob("*") if path.is_dir()]
    folders.sort(key=lambda folder: (folder.stat().st_mtime, folder.name), reverse=True)
    statuses = [_folder_status(folder, run.config) for folder in folders]
    order = list(Progress)
    status = max(statuses, key=lambda one: order.index(one.progress), default=RunStatus())
    if status.folder is not None and status.progress is not Progress.ABSENT:
        lines = changed_settings(status.folder, run.config)
        changed = [line for line in lines if not line.startswith(PLACES)]
        if changed:
            raise ConfigError(
                f"{status.folder} was made with other settings ({'; '.join(changed)}); move it "
                "away, or give the study another --output"
            )
    return status


def _folder_status(folder: Path, config: Config) -> RunStatus:
    lines, _ = read_lines(folder / METRICS_FILE)
    steps = {int(line["step"]): line for line in lines}
    seconds = [line["time/step_s"] for n, line in steps.items() if n and line.get("time/step_s")]
    last = config.training.steps
    has_final = GREEDY_KEY in steps.get(last, {}) or not config.evaluation.enable
    # A checkpoint is complete once it has its `.metadata`; see `training/checkpoint.py`.
    metadata = (folder / "checkpoints").glob("step-*/.metadata")
    if has_final and set(range(1, last + 1)) <= steps.keys():
        progress = Progress.COMPLETE
    elif any(re.fullmatch(r"step-\d+", file.parent.name) for file in metadata):
        progress = Progress.RESUMABLE
    else:
        progress = Progress.ABSENT
    return RunStatus(
        progress=progress,
        folder=folder,
        last_step=max(steps, default=0),
        step_s=statistics.fmean(seconds) if seconds else None,
    )


def read_lines(file: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """(records of a JSON lines file, numbers of its lines that a kill tore); no file is empty."""
    records, torn = [], []
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    for number, line in enumerate(text.splitlines(), 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            torn.append(number)
    return records, torn


def seconds_left(runs: Sequence[PlannedRun], guess_minutes: float) -> list[float]:
    """Seconds that are left of each run, which may be running.

    A step takes what it took in the arm's runs so far, else in those of all arms, else the guess.
    """
    statuses = [status_of(run) for run in runs]
    measured: dict[str, list[float]] = {}
    for run, status in zip(runs, statuses, strict=True):
        if status.step_s is not None:
            measured.setdefault(run.arm, []).append(status.step_s)
    means = {arm: statistics.fmean(values) for arm, values in measured.items()}
    overall = statistics.fmean(means.values()) if means else None
    left = []
    for run, status in zip(runs, statuses, strict=True):
        num_steps = run.config.training.steps
        step_s = means.get(run.arm) or overall or 60 * guess_minutes / num_steps
        done = status.last_step if status.progress is Progress.RESUMABLE else 0
        is_complete = status.progress is Progress.COMPLETE
        left.append(0.0 if is_complete else START_UP_S + (num_steps - done) * step_s)
    return left
