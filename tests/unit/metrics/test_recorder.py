"""The recorder: what lands in TensorBoard, in metrics.jsonl, on the console and on the bar."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollverify.hooks import StepState
from rollverify.metrics.recorder import Recorder, console_line


@pytest.fixture
def make_recorder(tmp_path):
    made = []

    def make(**changes) -> Recorder:
        settings = {
            "rank": 0,
            "world_size": 1,
            "total_steps": 10,
            "tensorboard": True,
            "progress": False,
        }
        made.append(Recorder(folder=tmp_path, **{**settings, **changes}))
        return made[-1]

    yield make
    for recorder in made:
        recorder.close()


def log_steps(recorder: Recorder, steps, reward: float) -> None:
    for step in steps:
        state = StepState(step=step, policy_version=step - 1)
        state.metrics["reward/mean"] = reward
        recorder.log(state)


def read_events(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder / "tb"), purge_orphaned_data=True)
    return events.Reload()


def read_lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_tb01_each_step_appears_once_after_a_resume(make_recorder, tmp_path):
    # Steps 1..7, checkpoint at 5, resume from 5 and log 6..8.
    first = make_recorder()
    log_steps(first, range(1, 8), reward=0.25)
    first.close()
    log_steps(make_recorder(resume_step=5), range(6, 9), reward=0.5)
    scalars = read_events(tmp_path).Scalars("reward/mean")
    assert [scalar.step for scalar in scalars] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [scalar.value for scalar in scalars] == [0.25] * 5 + [0.5] * 3
    lines = read_lines(tmp_path)
    assert [(line["step"], line["reward/mean"]) for line in lines] == [
        *((step, 0.25) for step in range(1, 6)),
        *((step, 0.5) for step in range(6, 9)),
    ]


def test_tb01_a_resume_without_checkpoint_starts_over(make_recorder, tmp_path):
    first = make_recorder()
    log_steps(first, range(1, 4), reward=0.25)
    first.close()
    log_steps(make_recorder(resume_step=0), [1], reward=0.5)
    scalars = read_events(tmp_path).Scalars("reward/mean")
    assert [(scalar.step, scalar.value) for scalar in scalars] == [(1, 0.5)]
    assert read_lines(tmp_path) == [{"step": 1, "reward/mean": 0.5}]


def test_tb03_a_kill_right_after_a_step_keeps_its_metrics(tmp_path):
    worker = Path(__file__).with_name("recorder_worker.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, str(worker), str(tmp_path)], env=environment, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    events = read_events(tmp_path)
    # The rollout that fed step 3 carries step 3, not a count of its own and not step 4.
    for key, factor in (("rollout/num_tokens", 100.0), ("train/loss", -0.5)):
        logged = [(scalar.step, scalar.value) for scalar in events.Scalars(key)]
        assert logged == [(1, factor), (2, 2 * factor), (3, 3 * factor)]
    assert read_lines(tmp_path)[-1] == {
        "step": 3,
        "rollout/num_tokens": 300.0,
        "train/loss": -1.5,
    }


def test_a_torn_last_line_is_dropped_at_resume(make_recorder, tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "rew')
    make_recorder(resume_step=2, tensorboard=False)
    assert read_lines(tmp_path) == [{"step": 1, "reward/mean": 0.5}]
    assert "damaged line" in caplog.text


def test_a_resume_says_which_steps_have_no_line(make_recorder, tmp_path, caplog):
    """Once for all of them; a step 0, the base model's, need not be there."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 4}\n')
    make_recorder(resume_step=4, tensorboard=False)
    (message,) = [record.message for record in caplog.records if "lacks" in record.message]
    assert "metrics.jsonl lacks 2 of the 4 steps so far, step 2 the first" in message


def test_a_resume_with_every_line_says_nothing(make_recorder, tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    make_recorder(resume_step=2, tensorboard=False)
    assert "lacks" not in caplog.text


def test_an_undeclared_key_is_refused_on_every_rank(make_recorder, tmp_path):
    for rank in (0, 1):
        state = StepState(step=1, policy_version=0, metrics={"reward/maen": 1.0})
        with pytest.raises(ValueError, match=r"reward/maen is not declared.*names\.py"):
            make_recorder(rank=rank, tensorboard=False).log(state)
    assert read_lines(tmp_path) == []


def test_a_value_that_json_lacks_becomes_null(make_recorder, tmp_path):
    state = StepState(step=1, policy_version=0, metrics={"train/loss": float("nan")})
    make_recorder(tensorboard=False).log(state)
    assert read_lines(tmp_path) == [{"step": 1, "train/loss": None}]


def test_phases_are_timed_in_order_also_when_one_fails(make_recorder):
    recorder = make_recorder(tensorboard=False)
    state = StepState(step=1, policy_version=0)
    with recorder.phase("rollout", state):
        sum(range(200_000))
    with pytest.raises(KeyError), recorder.phase("train", state):
        raise KeyError
    recorder.log(state)
    assert list(state.phase_s) == ["rollout", "train"]
    assert state.metrics["time/rollout_s"] == state.phase_s["rollout"] > 0.0
    # The step is what the phases took and what lies between them.
    assert state.metrics["time/step_s"] >= sum(state.phase_s.values())


def test_step_time_starts_anew_with_each_step(make_recorder):
    recorder = make_recorder(tensorboard=False)
    first, second = (StepState(step=step, policy_version=0) for step in (1, 2))
    with recorder.phase("rollout", first):
        sum(range(2_000_000))
    recorder.log(first)
    with recorder.phase("rollout", second):
        pass
    recorder.log(second)
    assert second.metrics["time/step_s"] < first.metrics["time/step_s"]


def test_console_line_shows_step_times_and_main_metrics():
    state = StepState(
        step=12,
        policy_version=12,
        metrics={"time/step_s": 84.14, "reward/mean": 0.4123, "train/entropy_nats": 0.5},
        phase_s={"rollout": 60.2, "train": 15.04, "verify": 3.1, "sync": 5.8},
    )
    assert console_line(state, total_steps=60) == (
        "step 12/60 | 84.1 s | rollout 60.2 train 15.0 verify 3.1 sync 5.8 "
        "| reward 0.412 | entropy 0.500"
    )


def test_one_console_line_per_step_on_rank_0_only(make_recorder, caplog):
    with caplog.at_level(logging.INFO, logger="rollverify"):
        recorders = [make_recorder(rank=rank, tensorboard=False) for rank in (0, 1)]
        caplog.clear()
        for recorder in recorders:
            log_steps(recorder, [1], reward=0.5)
    assert caplog.messages == ["step 1/10 | reward 0.500"]


def test_other_ranks_write_nothing(make_recorder, tmp_path):
    recorder = make_recorder(rank=1, world_size=2, progress=True)
    log_steps(recorder, [1], reward=0.5)
    recorder.log_text("samples/0", "text", 1)
    recorder.log_config("{}")
    assert list(tmp_path.iterdir()) == []


def test_texts_reach_tensorboard_literally(make_recorder, tmp_path):
    recorder = make_recorder(resume_step=3)
    recorder.log_config('{\n  "seed": 1\n}')
    recorder.log_text("samples/0", "**a**\n<b>", 4)
    tensors = {
        tag: read_events(tmp_path).Tensors(f"{tag}/text_summary")[0]
        for tag in ("config", "samples/0")
    }
    # Four spaces make a line literal in Markdown.
    assert tensors["config"].tensor_proto.string_val == [b'    {\n      "seed": 1\n    }']
    assert tensors["config"].step == 3
    assert tensors["samples/0"].tensor_proto.string_val == [b"    **a**\n    <b>"]
    assert tensors["samples/0"].step == 4


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "drawn"), [(Terminal(), True), (io.StringIO(), False)])
def test_the_bar_is_drawn_on_a_terminal_only(make_recorder, monkeypatch, stream, drawn):
    monkeypatch.setattr(sys, "stderr", stream)
    recorder = make_recorder(progress=True, tensorboard=False, resume_step=5)
    log_steps(recorder, [6, 7], reward=0.5)
    recorder.close()
    assert ("7/10" in stream.getvalue()) is drawn


def test_closing_twice_does_no_harm(make_recorder):
    recorder = make_recorder()
    recorder.close()
    recorder.close()
