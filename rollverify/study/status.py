"""How far each planned run is, read from its folder. Starts nothing and deletes nothing."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rollverify.checkpoint.run_folder import changed_settings
from rollverify.config.tables import Config
from rollverify.errors import ConfigError
from rollverify.metrics.recorder import METRICS_FILE
from rollverify.study.plan import PlannedRun

START_UP_S = 40.0
"""Seconds of a run outside its steps: imports, engine, first evaluation, export."""

GREEDY_KEY = "eval/greedy_accuracy"
PLACES = ("run.output_dir", "prepare.cache_dir")
"""Settings that may differ between a run and the plan: they do not change the result."""

_COMPLETE_CHECKPOINT = re.compile(r"step-\d+")


class Progress(StrEnum):
    """What is to be done about a run."""

    ABSENT = "not started"
    """It starts from the beginning; so does one that was killed before its first checkpoint."""
    RESUMABLE = "interrupted"
    """It goes on from its newest checkpoint."""
    COMPLETE = "complete"
    """Nothing: metrics of every step and the final evaluation are there."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RunStatus:
    """How far a run is."""

    progress: Progress
    folder: Path | None
    """Its run folder; None where there is none."""
    last_step: int
    """Last step that is logged; what comes after the newest checkpoint is done again."""
    step_s: float | None
    """Mean seconds of a step, evaluations included; None before the first."""


def status_of(run: PlannedRun) -> RunStatus:
    """Look at a run's place.

    Where several run folders lie there, a complete one counts, else the newest that can be resumed,
    else the newest.

    Raises:
        ConfigError: a folder that would be used was made with other settings.
    """
    folders = sorted((one for one in run.place.glob("*") if one.is_dir()), key=_age)
    statuses = [_folder_status(folder, run.config) for folder in folders]
    for wanted in Progress.COMPLETE, Progress.RESUMABLE, Progress.ABSENT:
        for status in reversed(statuses):
            if status.progress is wanted:
                if wanted is not Progress.ABSENT:
                    _refuse_other_settings(run, status)
                return status
    return RunStatus(progress=Progress.ABSENT, folder=None, last_step=0, step_s=None)


def is_complete(records: Sequence[dict[str, float]], config: Config) -> bool:
    """Whether every step is logged, and evaluated at the end if the config evaluates.

    Args:
        records: lines of metrics.jsonl.
        config: of the run.
    """
    steps = {int(record["step"]): record for record in records}
    last = config.training.steps
    if not set(range(1, last + 1)) <= steps.keys():
        return False
    return not config.evaluation.enable or GREEDY_KEY in steps[last]


def remaining_s(run: PlannedRun, status: RunStatus, step_s: float) -> float:
    """Seconds that are left of a run.

    Args:
        run: the run.
        status: of it.
        step_s: seconds of one of its steps.
    """
    if status.progress is Progress.COMPLETE:
        return 0.0
    done = status.last_step if status.progress is Progress.RESUMABLE else 0
    return START_UP_S + (run.config.training.steps - done) * step_s


def step_seconds(
    runs: Sequence[PlannedRun], statuses: Sequence[RunStatus], guess_minutes: float
) -> dict[str, float]:
    """Seconds of a step of each arm: measured in its runs, else in those of all arms, else guessed.

    Args:
        runs: the planned runs.
        statuses: of each.
        guess_minutes: minutes of a whole run.
    """
    measured: dict[str, list[float]] = {}
    for run, status in zip(runs, statuses, strict=True):
        if status.step_s is not None:
            measured.setdefault(run.arm, []).append(status.step_s)
    means = {arm: sum(values) / len(values) for arm, values in measured.items()}
    overall = sum(means.values()) / len(means) if means else None
    return {
        run.arm: means.get(run.arm, overall or 60 * guess_minutes / run.config.training.steps)
        for run in runs
    }


def read_lines(file: Path) -> list[dict[str, float]]:
    """Records of a JSON lines file; a last line that a kill tore is left out, no file is empty."""
    if not file.is_file():
        return []
    records = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def _folder_status(folder: Path, config: Config) -> RunStatus:
    records = read_lines(folder / METRICS_FILE)
    seconds = [one["time/step_s"] for one in records if one.get("time/step_s") and one["step"] > 0]
    if is_complete(records, config):
        progress = Progress.COMPLETE
    elif _has_checkpoint(folder):
        progress = Progress.RESUMABLE
    else:
        progress = Progress.ABSENT
    return RunStatus(
        progress=progress,
        folder=folder,
        last_step=max((int(one["step"]) for one in records), default=0),
        step_s=sum(seconds) / len(seconds) if seconds else None,
    )


def _has_checkpoint(folder: Path) -> bool:
    """A checkpoint is complete once it has its `.metadata`; see `training/checkpoint.py`."""
    found = (folder / "checkpoints").glob("step-*/.metadata")
    return any(_COMPLETE_CHECKPOINT.fullmatch(one.parent.name) for one in found)


def _refuse_other_settings(run: PlannedRun, status: RunStatus) -> None:
    assert status.folder is not None
    changed = [
        line
        for line in changed_settings(status.folder, run.config)
        if not line.startswith(tuple(f"{place}:" for place in PLACES))
    ]
    if changed:
        raise ConfigError(
            f"{status.folder} was made with other settings ({'; '.join(changed)}); move it away, "
            "or give the study another --output"
        )


def _age(folder: Path) -> tuple[float, str]:
    return folder.stat().st_mtime, folder.name
