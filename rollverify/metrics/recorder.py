"""Records a run: phase timers, TensorBoard, a JSON line and a console line per step, a bar.

Does not reduce over ranks: what it is given holds for the whole run. Only rank 0 writes.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from tqdm import tqdm

from rollverify.hooks import StepState
from rollverify.metrics.json_lines import open_for_resume
from rollverify.metrics.names import is_declared, phase_time_key

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter
import re

CHARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "training": {
        "entropy (nats)": ("train/entropy_nats",),
        "reward": ("reward/mean", "reward/accuracy"),
        "response length (tokens)": (
            "rollout/response_tokens_mean",
            "rollout/response_tokens_p95",
        ),
        "OPS of what was trained on": ("ops/trained_sequence_mean", "ops/trained_sequence_p95"),
    },
    "speed": {
        "generation time (s)": ("time/rollout_s", "time/step_s"),
        "acceptance rate": ("verification/acceptance_rate", "switching/average_rate"),
        "share of verification": ("verification/step_frac",),
    },
    "staleness": {
        "OPS of unfinished responses": (
            "ops/unfinished_sequence_mean",
            "ops/unfinished_sequence_p95",
        ),
        "OPS by age": ("ops/trained_age_<age>",),
        "engine mismatch by age (nats)": ("mismatch/age_<age>",),
        "trained tokens by age": ("staleness/trained_tokens_age_<age>_frac",),
        "age of what was trained on (steps)": ("staleness/trained_mean", "staleness/trained_max"),
    },
}
"""Keys of metrics by category and chart; `<...>` stands for every name, as in `names.py`."""


def layout() -> dict[str, dict[str, list[object]]]:
    """The charts as TensorBoard's `add_custom_scalars` takes them: one regular expression a key."""
    return {
        category: {
            title: ["Multiline", [_pattern(key) for key in keys]] for title, keys in charts.items()
        }
        for category, charts in CHARTS.items()
    }


def _pattern(key: str) -> str:
    """TensorBoard matches from the start only, so the end is marked."""
    return re.sub(r"<\w+>", r"\\w+", key) + "$"


logger = logging.getLogger(__name__)

TENSORBOARD_FOLDER = "tb"
METRICS_FILE = "metrics.jsonl"

_CONSOLE_METRICS = (
    ("reward", "reward/mean", ".3f"),
    ("accuracy", "reward/accuracy", ".3f"),
    ("tokens", "rollout/response_tokens_mean", ".0f"),
    ("entropy", "train/entropy_nats", ".3f"),
    ("grad", "train/grad_norm", ".3g"),
    ("mismatch", "mismatch/logprob_abs_mean", ".1e"),
)


class Recorder:
    """One per process, made after the run's folder; every rank calls the same methods.

    A run that is resumed after step s passes `resume_step=s` with the same folder: what an
    earlier process wrote for later steps is dropped, so each step appears once.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        world_size: int,
        total_steps: int,
        tensorboard: bool,
        progress: bool,
        resume_step: int = 0,
    ) -> None:
        """Open the files on rank 0.

        Args:
            folder: the run's folder; made if missing.
            rank: this process's global rank.
            world_size: number of processes; shown, not used to scale anything.
            total_steps: last step of the run, for the bar and the console line.
            tensorboard: write `<folder>/tb`.
            progress: draw a bar, if stderr is a terminal.
            resume_step: last step that is kept from an earlier process; 0 for a new run.

        Raises:
            OSError: if the folder cannot be written.
        """
        self._total_steps = total_steps
        self._resume_step = resume_step
        self._step_start_s: float | None = None
        self.unlogged_s: dict[str, float] = {}
        """Seconds by phase of what followed the newest line; the next one carries them."""
        self._is_writer = rank == 0
        self._writer: SummaryWriter | None = None
        self._metrics_file: TextIO | None = None
        self._bar: tqdm[NoReturn] | None = None
        if not self._is_writer:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics_file = open_for_resume(folder / METRICS_FILE, resume_step, every_step=True)
        if tensorboard:
            self._writer = _open_tensorboard(folder / TENSORBOARD_FOLDER, resume_step)
        logger.info("recording to %s (world size %d)", folder, world_size)
        if progress and sys.stderr.isatty():
            self._bar = tqdm(
                total=total_steps, initial=resume_step, unit="step", dynamic_ncols=True
            )

    @contextmanager
    def phase(self, name: str, state: StepState | None = None) -> Generator[None]:
        """Time a phase into `state.phase_s` and the metric `time/<name>_s`, also if it fails.

        Args:
            name: of the phase.
            state: the iteration's; None for what follows its line, which the next line carries.
        """
        start_s = time.perf_counter()
        if self._step_start_s is None:
            self._step_start_s = start_s
        if self._bar is not None:
            self._bar.set_description(name)
        try:
            yield
        finally:
            seconds = self.unlogged_s if state is None else state.phase_s
            seconds[name] = time.perf_counter() - start_s
            if state is not None:
                state.metrics[phase_time_key(name)] = state.phase_s[name]

    def log(self, state: StepState) -> None:
        """Write the step's metrics and flush them, so that a kill right after loses nothing.

        Adds `time/step_s`, the time since the first phase of the step began, and the seconds of
        what followed the line before.

        Args:
            state: the iteration's state; metrics already reduced over ranks.

        Raises:
            ValueError: on every rank, if a metric key is not declared.
        """
        undeclared = sorted(key for key in state.metrics if not is_declared(key))
        if undeclared:
            raise ValueError(
                f"metric {', '.join(undeclared)} is not declared; "
                "add key, unit and meaning to rollverify/metrics/names.py"
            )
        if self._step_start_s is not None:
            state.metrics["time/step_s"] = time.perf_counter() - self._step_start_s
            self._step_start_s = None
        state.phase_s = {**self.unlogged_s, **state.phase_s}
        state.metrics |= {phase_time_key(name): s for name, s in self.unlogged_s.items()}
        self.unlogged_s = {}
        if self._metrics_file is not None:
            self._metrics_file.write(_json_line(state))
            self._metrics_file.flush()
        if self._writer is not None:
            for key, value in state.metrics.items():
                self._writer.add_scalar(key, float(value), state.step)
            self._writer.flush()
        if self._is_writer:
            logger.info("%s", console_line(state, self._total_steps))
        if self._bar is not None:
            self._bar.update(state.step - self._bar.n)

    def log_text(self, tag: str, text: str, step: int) -> None:
        """Write a text to TensorBoard, shown character by character, not as Markdown."""
        if self._writer is not None:
            literal = "\n".join(f"    {line}" for line in text.splitlines())
            self._writer.add_text(tag, literal, step)
            self._writer.flush()

    def log_config(self, json_text: str) -> None:
        """Write the resolved configuration to TensorBoard, at the step the process starts from."""
        self.log_text("config", json_text, self._resume_step)

    def close(self) -> None:
        """Close the files and the bar; may be called twice."""
        if self._bar is not None:
            self._bar.close()
        if self._writer is not None:
            self._writer.close()
        if self._metrics_file is not None:
            self._metrics_file.close()
        self._bar = self._writer = self._metrics_file = None


def console_line(state: StepState, total_steps: int) -> str:
    """One line about a step: its seconds, the seconds of each phase, and the main metrics."""
    parts = [f"step {state.step}/{total_steps}"]
    if "time/step_s" in state.metrics:
        parts.append(f"{state.metrics['time/step_s']:.1f} s")
    if state.phase_s:
        parts.append(" ".join(f"{name} {phase_s:.1f}" for name, phase_s in state.phase_s.items()))
    parts += [
        f"{label} {format(state.metrics[key], form)}"
        for label, key, form in _CONSOLE_METRICS
        if key in state.metrics
    ]
    return " | ".join(parts)


def _json_line(state: StepState) -> str:
    """The step as one JSON line; a value that JSON cannot hold (NaN, infinity) becomes null."""
    values = {key: float(value) for key, value in sorted(state.metrics.items())}
    finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
    return json.dumps({"step": state.step, **finite}, allow_nan=False) + "\n"


def _open_tensorboard(folder: Path, resume_step: int) -> SummaryWriter:
    # Imported here because it takes 0.3 s that ranks without a writer need not pay.
    from torch.utils.tensorboard.writer import SummaryWriter

    # Readers drop what earlier event files hold from the purge step on.
    writer = SummaryWriter(log_dir=str(folder), purge_step=resume_step + 1)
    writer.add_custom_scalars(layout())
    return writer
