"""The training loop and the run around it: order of events, stopping, the end."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fakes import FakeEngine

from rollverify.checkpoint.checkpoint import Checkpointing
from rollverify.config.load import load_config
from rollverify.errors import EngineFailedError, NoSignalError, RolloutStopped
from rollverify.hooks import HookPoint, HookRegistry, StepState
from rollverify.metrics.recorder import Recorder
from rollverify.run import Run
from rollverify.train import train, train_to_end

pytestmark = pytest.mark.usefixtures("process_group")


class FakeStop:
    """A stop request that a test can make."""

    def __init__(self, events: list[str]) -> None:
        self.signal_number: int | None = None
        self._events = events

    @property
    def requested(self) -> bool:
        return self.signal_number is not None

    @requested.setter
    def requested(self, value: bool) -> None:
        self.signal_number = 2 if value else None

    def take(self, number: int, *, of_others: bool) -> None:
        self.signal_number = self.signal_number or number

    @property
    def exit_code(self) -> int:
        return 130 if self.requested else 0

    def done(self) -> None:
        self._events.append("done")


class LoggingRecorder(Recorder):
    """The real recorder, which also writes "log" into the events."""

    events: list[str]

    def log(self, state: StepState) -> None:
        super().log(state)
        self.events.append("log")


class FakeEvaluation:
    def __init__(self, events: list[str]) -> None:
        self.results: dict[int, dict[str, float]] = {}
        self.is_pending = False
        self._events = events

    def is_due(self, step: int) -> bool:
        return step == 2

    def run(self, step: int) -> dict[str, float]:
        self._events.append(f"evaluate@{step}")
        self.results[step] = {"eval/greedy_accuracy": 0.5}
        return self.results[step]


def make_run(
    folder: Path, *flags: str, first_step: int = 1, **changes: Any
) -> tuple[Run, list[str]]:
    """A run of two steps whose parts write into one list of events."""
    events: list[str] = []

    def note(event: str, result: Any = None) -> Any:
        events.append(event)
        return result

    hooks = HookRegistry()
    hooks.register(
        HookPoint.BEFORE_WEIGHT_SYNC, "verification", lambda s: note(f"verify@{s.policy_version}")
    )
    recorder = LoggingRecorder(
        folder=folder,
        rank=0,
        world_size=1,
        total_steps=2,
        tensorboard=False,
        progress=False,
    )
    recorder.events = events
    parts = {
        "config": load_config(["--training.steps", "2", *flags]).config,
        "folder": folder,
        "rank": 0,
        "policy": SimpleNamespace(
            step=first_step - 1,
            device=torch.device("cpu"),
            close=lambda: note("close policy"),
        ),
        "rollouter": SimpleNamespace(collect=lambda version: note(f"rollout@{version}", ([], []))),
        "trainer": SimpleNamespace(
            train_step=lambda finished, version: note(f"train@{version}", {"train/loss": 0.5})
        ),
        "weight_sync": SimpleNamespace(push=lambda version: note(f"sync@{version}")),
        "hooks": hooks,
        "recorder": recorder,
        "evaluation": None,
        "checkpointing": Checkpointing(
            save_step=lambda step: note(f"save@{step}"), every_steps=0, last_step=2
        ),
        "engine": FakeEngine(events=events),
        "finish_checkpoint": lambda: None,
        "save_in_flight": lambda step: note(f"save in flight@{step}"),
        "export": lambda path: note(f"export {path.name}"),
        "stop": FakeStop(events),
        "first_step": first_step,
    }
    return Run(**(parts | changes)), events


TWO_STEPS = ["rollout@0", "sleep", "train@0", "verify@1", "sync@1", "log"]
TWO_STEPS += ["rollout@1", "sleep", "train@1", "verify@2", "sync@2", "log"]


def at_step(step: int, action: Callable[[], None]) -> Callable[[StepState], None]:
    return lambda state: action() if state.step == step else None


def test_two_iterations_run_their_phases_in_order(tmp_path):
    run, events = make_run(tmp_path)
    train(run)
    assert events == TWO_STEPS
    assert run.policy.step == 2


def test_a_checkpoint_is_saved_when_the_lines_of_its_step_are_on_disk(tmp_path):
    """A kill right after a checkpoint is complete: a resumed run keeps the lines up to it."""
    seen: list[tuple[int, list[int]]] = []

    def save(step: int) -> None:
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        seen.append((step, [json.loads(line)["step"] for line in lines]))

    checkpointing = Checkpointing(save_step=save, every_steps=1, last_step=2)
    run, _ = make_run(tmp_path, checkpointing=checkpointing)
    train(run)
    assert seen == [(1, [1]), (2, [1, 2])]


def test_the_line_after_a_checkpoint_carries_its_seconds(tmp_path):
    checkpointing = Checkpointing(
        save_step=lambda step: time.sleep(0.05), every_steps=1, last_step=2
    )
    run, _ = make_run(tmp_path, checkpointing=checkpointing)
    train(run)
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert "time/checkpoint_s" not in first
    assert second["time/step_s"] >= second["time/checkpoint_s"] >= 0.05
    assert run.recorder.unlogged_s["checkpoint"] >= 0.05  # Of step 2, for the report.


def test_hooks_run_inside_their_phase_and_see_the_version_of_that_moment(tmp_path):
    run, events = make_run(tmp_path, "--training.steps", "1")
    for point in HookPoint:
        name = f"at_{point}"
        run.hooks.register(
            point,
            name,
            lambda s, n=name: events.append(f"{n} {list(s.phase_s)} {s.policy_version}"),
        )
    train(run)
    assert events == [
        "rollout@0",
        "sleep",
        "at_after_rollout [] 0",
        "train@0",
        "at_after_train ['rollout'] 1",
        "verify@1",
        "at_before_weight_sync ['rollout', 'train'] 1",
        "sync@1",
        "at_after_weight_sync ['rollout', 'train', 'verify'] 1",
        "log",
    ]


def test_a_hook_that_fails_stops_the_step_before_the_sync(tmp_path):
    run, events = make_run(tmp_path)

    def fail(state: StepState) -> None:
        raise RuntimeError("no")

    run.hooks.register(HookPoint.BEFORE_WEIGHT_SYNC, "broken", fail)
    with pytest.raises(RuntimeError, match="no") as caught:
        train(run)
    assert events == ["rollout@0", "sleep", "train@0", "verify@1"]
    assert caught.value.__notes__ == ["raised by hook 'broken' at before_weight_sync, step 1"]


def test_a_resumed_run_goes_on_with_its_step_and_version(tmp_path):
    run, events = make_run(tmp_path, first_step=2)
    run.start()
    train(run)
    assert events == ["sync@1", *TWO_STEPS[6:]]


def test_the_base_model_is_measured_once_at_step_0(tmp_path):
    run, events = make_run(tmp_path)
    run.evaluation = FakeEvaluation(events)
    run.start()
    assert events == ["sync@0", "evaluate@0", "log"]
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 0, "eval/greedy_accuracy": 0.5}


def test_a_resumed_run_does_not_pass_its_model_off_as_the_base_model(tmp_path):
    run, events = make_run(tmp_path, first_step=2)
    run.evaluation = FakeEvaluation(events)  # Evaluation was off in the first part of the run.
    run.start()
    assert events == ["sync@1"]


def test_a_resumed_run_makes_up_for_an_evaluation_that_was_stopped(tmp_path):
    run, events = make_run(tmp_path, first_step=3)
    run.policy.step = 2
    run.evaluation = FakeEvaluation(events)
    run.start()
    assert events == ["sync@2", "evaluate@2"]
    assert run.finish() == 0


def test_a_run_stopped_in_its_last_evaluation_is_not_finished(tmp_path):
    run, events = make_run(tmp_path)
    train(run)
    run.evaluation = FakeEvaluation(events)
    run.evaluation.is_pending = run.stop.requested = True
    assert run.finish() == 130
    assert events[12:] == ["save@2", "done"]  # Nothing is exported.


def test_a_stop_in_a_rollout_saves_what_it_has_generated(tmp_path):
    """The second rollout is paused: the trainer holds step 1."""
    run, events = make_run(tmp_path)

    def collect(version: int) -> tuple[list[Any], list[Any]]:
        if version == 1:
            run.stop.requested = True
            raise RolloutStopped("asked to stop")
        return [], []

    run.rollouter = SimpleNamespace(collect=collect)
    assert train_to_end(run) == 130
    assert events[5:] == ["save in flight@1", "done"]


def test_a_stop_request_is_answered_between_two_steps(tmp_path):
    run, events = make_run(tmp_path)
    run.hooks.register(
        HookPoint.AFTER_ROLLOUT, "signal", at_step(1, lambda: setattr(run.stop, "requested", True))
    )
    train(run)
    assert events == TWO_STEPS[:6]  # The step under way is finished and logged.
    assert run.finish() == 130
    assert events[6:] == ["save@1", "done"]  # Saved before the timer is told; nothing exported.


def test_an_interrupted_run_may_leave_without_a_checkpoint(tmp_path):
    run, events = make_run(tmp_path, "--checkpoint.save-on-interrupt", "false")
    run.hooks.register(
        HookPoint.AFTER_TRAIN, "signal", at_step(1, lambda: setattr(run.stop, "requested", True))
    )
    train(run)
    assert run.finish() == 130
    assert events[6:] == ["done"]


def test_a_stop_before_the_first_step_saves_nothing(tmp_path):
    run, events = make_run(tmp_path)
    run.stop.requested = True
    train(run)
    assert run.finish() == 130
    assert events == ["done"]


def test_a_stop_in_the_last_step_does_not_spoil_the_end(tmp_path, capsys):
    run, events = make_run(tmp_path)
    run.hooks.register(
        HookPoint.AFTER_TRAIN, "signal", at_step(2, lambda: setattr(run.stop, "requested", True))
    )
    train(run)
    assert run.finish() == 0
    assert events[12:] == ["export model", "done"]
    assert "run folder" in capsys.readouterr().out


@pytest.mark.parametrize(("rank", "is_printed"), [(0, True), (1, False)])
def test_a_finished_run_exports_and_reports_on_rank_0(tmp_path, capsys, rank, is_printed):
    run, events = make_run(tmp_path, rank=rank)
    train(run)
    assert run.finish() == 0
    assert events == [*TWO_STEPS, "export model", "done"]
    assert (tmp_path / "report.txt").is_file() is is_printed
    assert bool(capsys.readouterr().out) is is_printed


def test_a_run_may_end_without_an_export(tmp_path):
    run, events = make_run(tmp_path, "--checkpoint.export-final", "false")
    train(run)
    run.finish()
    assert events == [*TWO_STEPS, "done"]


def test_close_releases_engine_policy_and_process_group(tmp_path):
    run, events = make_run(tmp_path)
    run.close()
    assert events == ["close engine", "close policy"]
    assert not dist.is_initialized()


@pytest.mark.parametrize("error", [EngineFailedError, NoSignalError])
@pytest.mark.parametrize(
    ("every_steps", "failing", "saved"),
    [("1", 1, ["save in flight@1"]), ("0", 1, []), ("1", 0, [])],
)
def test_what_is_in_flight_is_saved_when_rollouts_end(tmp_path, every_steps, failing, saved, error):
    """The second rollout fails: the trainer holds step 1. Before it there is nothing to keep."""
    run, events = make_run(tmp_path, "--checkpoint.every-steps", every_steps)

    def collect(version: int) -> tuple[list[Any], list[Any]]:
        if version == failing:
            raise error("group 7 sample 0")
        return [], []

    run.rollouter = SimpleNamespace(collect=collect)
    with pytest.raises(error, match="group 7"):
        train_to_end(run)
    assert events[5 * failing :] == saved
