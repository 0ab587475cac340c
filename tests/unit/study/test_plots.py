"""Plots: one file each, and none where there is nothing to draw."""

import pytest
from unit.study.folders import records, study

pytest.importorskip("matplotlib", reason="matplotlib is in the extras study and dev")

from matplotlib import pyplot as plt

from rollverify.study.plots import PLOTS, bubble, cost_model, curves, draw_all, lengths
from rollverify.study.records import read_run
from rollverify.study.results import collect

ACCURACIES = {"on_policy": (0.6, 0.8), "rollverify": (0.5, 0.75)}


@pytest.fixture
def results(tmp_path):
    found = records(tmp_path / "runs", ACCURACIES, rollout__decode_steps=5.0)
    yield collect(study(), found)
    plt.close("all")


def test_every_plot_is_drawn(results, tmp_path):
    files = draw_all(results, tmp_path)
    assert [file.stem for file in files] == [draw.__name__ for draw in PLOTS]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    assert plt.get_fignums() == []


@pytest.mark.slow
def test_the_same_runs_give_the_same_files(results, tmp_path):
    first = [file.read_bytes() for file in draw_all(results, tmp_path)]
    assert first == [file.read_bytes() for file in draw_all(results, tmp_path)]


def test_nothing_is_drawn_without_runs(tmp_path):
    missing = [read_run(arm, seed, None) for arm in ACCURACIES for seed in (0, 1)]
    assert draw_all(collect(study(), missing), tmp_path) == []


def test_the_bubble_is_the_middle_phase_of_the_first_seed(results):
    axes = bubble(results).axes[0]
    labels = [line.get_label() for line in axes.lines]
    assert labels == ["on policy, step 2", "RollVerify, step 2"]
    assert list(axes.lines[0].get_ydata()) == [8, 8, 4]


def test_a_band_spans_the_seeds(results):
    results.arms[0].records[1].steps.loc[1, "reward/mean"] = 1.0
    reward = curves(results).axes[1]
    assert reward.lines[0].get_ydata()[0] == 0.75  # mean of 0.5 and 1
    assert reward.collections[0].get_paths()[0].get_extents().ymax == 1.0


def test_lengths_are_those_of_all_seeds(results):
    assert len(lengths(results).axes[0].patches) == 2


def test_the_line_of_the_cost_model_is_the_fit(results):
    line = cost_model(results).axes[0].lines[-1]
    # 0.2 s at 2 active and 0.4 s at 4: 0 ms at none, 400 ms at the most, 4
    assert list(line.get_xdata()) == [0, 4]
    assert list(line.get_ydata()) == pytest.approx([0, 400], abs=1e-9)
