"""The slot trace: what a phase did by engine step, over all ranks."""

import json
from types import SimpleNamespace

import pytest
from support.fakes import trajectory
from unit.metrics import slot_trace_worker

from rollverify.hooks import StepState
from rollverify.metrics.json_lines import SLOTS_FILE, SlotLog
from rollverify.metrics.rollout import SlotTrace, summed
from rollverify.ranks import Ranks


def test_a_phase_is_written_and_the_state_left_alone(tmp_path):
    rollouter = SimpleNamespace(stats=SimpleNamespace(active=[2, 2, 1]), ranks=Ranks())
    finished = [trajectory([0], [1, 2], sample=0), trajectory([0], [3], sample=1)]
    state = StepState(step=5, policy_version=4, finished=finished)
    stage = SlotTrace(rollouter=rollouter, slot_log=SlotLog(tmp_path, rank=0))
    assert stage(state) is None
    line = json.loads((tmp_path / SLOTS_FILE).read_text())
    assert line == {"step": 5, "active": [2, 2, 1], "lengths": [2, 1]}
    assert state.metrics == {} and state.finished is finished


def test_a_rank_that_has_ended_runs_nothing():
    assert summed([[4, 4, 1], [3]]) == [7, 4, 1]
    assert summed([[], []]) == []


@pytest.mark.distributed
def test_two_ranks_write_one_line(run_gloo_workers):
    folder = run_gloo_workers(slot_trace_worker.main, 2)
    line = json.loads((folder / SLOTS_FILE).read_text())
    assert line == {"step": 2, "active": [7, 4, 1], "lengths": [1, 2]}
