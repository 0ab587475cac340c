"""The charts of TensorBoard's custom page: declared keys, each found by its pattern alone."""

import re

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from rollverify.hooks import StepState
from rollverify.metrics.names import METRICS, is_declared
from rollverify.metrics.recorder import CHARTS, Recorder, layout

KEYS = [key for charts in CHARTS.values() for keys in charts.values() for key in keys]


def record(folder, *, step: int, resume_step: int) -> None:
    recorder = Recorder(
        folder=folder,
        rank=0,
        world_size=1,
        total_steps=9,
        tensorboard=True,
        progress=False,
        resume_step=resume_step,
    )
    recorder.log(StepState(step=step, policy_version=step, metrics={"reward/mean": 0.5}))
    recorder.close()


def shown_layout(folder) -> tuple[Layout, list[int]]:
    """(layout that TensorBoard takes, steps of the reward)."""
    events = EventAccumulator(str(folder / "tb"), purge_orphaned_data=True).Reload()
    first = events.Tensors("custom_scalars__config__")[0]
    steps = [event.step for event in events.Scalars("reward/mean")]
    return Layout.FromString(first.tensor_proto.string_val[0]), steps


def test_every_key_in_a_chart_is_declared():
    undeclared = [key for key in KEYS if not is_declared(re.sub(r"<\w+>", "4_7", key))]
    assert undeclared == []


def test_a_pattern_finds_its_key_and_no_longer_one():
    """TensorBoard uses `re.match`."""
    (pattern,) = layout()["training"]["entropy (nats)"][1]
    assert re.match(pattern, "train/entropy_nats")
    assert not re.match(pattern, "train/entropy_nats_min")
    (pattern,) = layout()["staleness"]["trained tokens by age"][1]
    assert re.match(pattern, "staleness/trained_tokens_age_4_7_frac")
    assert not re.match(pattern, "staleness/trained_tokens_age_4_7_frac/x")


def test_the_paper_s_figures_are_together():
    assert list(CHARTS["training"]) == [
        "entropy (nats)",
        "reward",
        "response length (tokens)",
        "OPS of what was trained on",
    ]
    assert list(CHARTS["speed"])[:2] == ["generation time (s)", "acceptance rate"]


def test_titles_name_the_unit_of_what_has_one():
    units = {"train/entropy_nats": "nats", "rollout/response_tokens_mean": "tokens"}
    units |= {
        "time/rollout_s": "s",
        "mismatch/age_<age>": "nats",
        "staleness/trained_mean": "steps",
    }
    for charts in CHARTS.values():
        for title, keys in charts.items():
            if keys[0] in units:
                assert METRICS[keys[0]].unit == units[keys[0]]
                assert title.endswith(f"({units[keys[0]]})")


def test_the_layout_reaches_tensorboard(tmp_path):
    record(tmp_path, step=1, resume_step=0)
    shown, _ = shown_layout(tmp_path)
    assert [one.title for one in shown.category] == list(CHARTS)
    assert [one.title for one in shown.category[0].chart] == list(CHARTS["training"])
    assert list(shown.category[0].chart[1].multiline.tag) == ["reward/mean$", "reward/accuracy$"]


def test_the_layout_of_a_resumed_run_costs_no_step(tmp_path):
    """The layout carries no step; it must not count as a step before the resumed one."""
    for step in (1, 2, 3):
        record(tmp_path, step=step, resume_step=step - 1)
    shown, steps = shown_layout(tmp_path)
    assert steps == [1, 2, 3]
    assert len(shown.category) == len(CHARTS)
