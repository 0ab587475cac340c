"""Records a run: phase timers, TensorBoard, a JSON line and a console line per step, a bar."""

from __future__ import annotations

import logging
import math
import re
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tqdm import tqdm

from rollverify.hooks import StepState
from rollverify.metrics.json_lines import JsonLines
from rollverify.metrics.names import is_declared, phase_time_key

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

logger = logging.getLogger(__name__)

TENSORBOARD_FOLDER = "tb"
METRICS_FILE = "metrics.jsonl"

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


_CONSOLE_METRICS = (
    ("reward", "reward/mean", ".3f"),
    ("accuracy", "reward/accuracy", ".3f"),
    ("tokens", "rollout/response_tokens_mean", ".0f"),
    ("entropy", "train/entropy_nats", ".3f"),
    ("grad", "train/grad_norm", ".3g"),
    ("mismatch", "mismatch/logprob_abs_mean", ".1e"),
)


@dataclass(kw_only=True)
class Recorder:
    """Takes metrics of the whole run, already reduced over ranks; every rank calls, rank 0 writes.

    A run resumed after step s passes `resume_step=s`: what an earlier process wrote for later steps
    is dropped, so each step appears once.
    """

    folder: Path
    rank: int
    world_size: int
    total_steps: int
    tensorboard: bool
    progress: bool
    """Draw a bar, if stderr is a terminal."""

    resume_step: int = 0
    current_phase: str = field(default="its start", init=False)
    """Entered last, in words."""

    unlogged_s: dict[str, float] = field(default_factory=dict[str, float], init=False)
    """Seconds by phase since the newest line; the next one carries them."""

    def __post_init__(self) -> None:
        self._step_start_s: float | None = None
        self._writer: SummaryWriter | None = None
        self._bar: tqdm[NoReturn] | None = None
        self._lines = JsonLines(
            self.folder / METRICS_FILE,
            rank=self.rank,
            resume_step=self.resume_step,
            every_step=True,
        )
        if self.rank != 0:
            return
        if self.tensorboard:
            self._writer = _open_tensorboard(self.folder / TENSORBOARD_FOLDER, self.resume_step)
        logger.info("recording to %s (world size %d)", self.folder, self.world_size)
        if self.progress and sys.stderr.isatty():
            self._bar = tqdm(
                total=self.total_steps, initial=self.resume_step, unit="step", dynamic_ncols=True
            )

    @contextmanager
    def phase(self, name: str, state: StepState | None = None) -> Generator[None]:
        """Time a phase into `state.phase_s` and the metric `time/<name>_s`, also if it fails.

        Without a state it is one that follows the step's line; the next line carries it.
        """
        start_s = time.perf_counter()
        self.current_phase = name if state is None else f"{name} of step {state.step}"
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
        self._lines.write(state.step, [_finite(state.metrics)])
        if self._writer is not None:
            for key, value in state.metrics.items():
                self._writer.add_scalar(key, float(value), state.step)
            self._writer.flush()
        if self.rank == 0:
            logger.info("%s", console_line(state, self.total_steps))
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
        self.log_text("config", json_text, self.resume_step)

    def close(self) -> None:
        """Close the files and the bar; may be called twice."""
        if self._bar is not None:
            self._bar.close()
        if self._writer is not None:
            self._writer.close()
        self._lines.close()
        self._bar = self._writer = None


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


def _finite(metrics: dict[str, float]) -> dict[str, float | None]:
    """By sorted key; a value that JSON cannot hold (NaN, infinity) becomes None."""
    values = {key: float(value) for key, value in sorted(metrics.items())}
    return {key: value if math.isfinite(value) else None for key, value in values.items()}


def _open_tensorboard(folder: Path, resume_step: int) -> SummaryWriter:
    # Imported here because it takes 0.3 s that ranks without a writer need not pay.
    from torch.utils.tensorboard.writer import SummaryWriter

    # Readers drop what earlier event files hold from the purge step on.
    writer = SummaryWriter(log_dir=str(folder), purge_step=resume_step + 1)
    writer.add_custom_scalars(layout())
    return writer
