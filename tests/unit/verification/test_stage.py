"""Verification of U_k through the buffer: what is cut, stamped, logged and counted."""

import json
from math import isfinite, log

import pytest
from unit.verification.scored import held_in, lengths, scoring, verification

from rollverify.config.tables import FilterConfig, VerificationConfig
from rollverify.metrics.json_lines import CUTS_FILE, AuditLog
from rollverify.metrics.names import is_declared
from rollverify.rollout.trajectory import FIELDS, Status, validate_trajectory

VF01 = {0: [-0.10, -0.20], 1: [-0.30, -0.40]}
VF01_UPDATED = [-0.10, -0.205, -0.28, -1.60]


def run(groups, updated, folder, *, thresholds=(0.01, 2.0), group_size=1, finish=()):
    """(buffer, state) after verification; `finish` names samples that are finished before."""
    buffer, ledger, state = held_in(groups, group_size)
    for group, sample in finish:
        buffer.set_outcome(buffer.group(group)[sample], Status.STOP, 1.0)
    audit_log = AuditLog(folder, rank=0)
    settings = VerificationConfig(segment_threshold=thresholds[0], token_threshold=thresholds[1])
    verification(scoring(updated), buffer, ledger, settings=settings, audit_log=audit_log)(state)
    audit_log.close()
    buffer.check()
    return buffer, state


def cuts_in(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / CUTS_FILE).read_text().splitlines()]


def test_the_segment_stage_cuts_whole_segments(tmp_path):
    """VF01: D = 0, 0.004988, 0.020201, 0.698806; segment means 0.002494 and 0.359504; keep 2."""
    _, state = run({0: [VF01]}, {(0, 0): VF01_UPDATED}, tmp_path)
    assert lengths(state.unfinished) == [2]
    (cut,) = cuts_in(tmp_path)
    assert cut.pop("ops") == pytest.approx(0.359504, abs=1e-6)
    assert cut == {
        "step": 3,
        "policy_version": 3,
        "group_id": 0,
        "sample_index": 0,
        "rule": "segment",
        "index": 2,
        "kept_tokens": 2,
        "cut_tokens": 2,
        "cut_versions": [1],
    }


def test_the_segment_threshold_is_inclusive(tmp_path):
    """VF01: a segment mean of 0.5 at threshold 0.5 leaves 0 tokens; 1 - 0.5 is exact in float32."""
    groups, updated = {0: [{1: [0.0]}]}, {(0, 0): [log(0.5)]}
    _, at = run(groups, updated, tmp_path, thresholds=(0.5, 2.0))
    assert lengths(at.unfinished) == [0]
    _, above = run(groups, updated, tmp_path, thresholds=(0.5001, 2.0))
    assert lengths(above.unfinished) == [1]


def test_the_token_stage_cuts_every_array_at_one_index(tmp_path):
    """VF03: D = 0, 0, 0, 3.4817, 0; segment mean 0.6963 < 1; token cut at 3, so 3 are left."""
    groups = {0: [{2: [-0.5, -0.5, -0.5, -4.0, -0.5]}]}
    updated = {(0, 0): [-0.5, -0.5, -0.5, -2.5, -0.5]}
    _, state = run(groups, updated, tmp_path, thresholds=(1.0, 2.0))
    (one,) = state.unfinished
    for key, field in FIELDS.items():
        if field.per == "response":
            assert one[key].shape == (3,), key
    assert one["response_ids"].tolist() == [0, 1, 2]
    validate_trajectory(one)
    (cut,) = cuts_in(tmp_path)
    assert (cut["rule"], cut["index"], cut["cut_tokens"]) == ("token", 3, 2)
    assert cut["ops"] == pytest.approx(3.481689, abs=1e-5)
    assert cut["cut_versions"] == [2]


def test_a_finished_response_that_is_cut_is_unfinished_again(tmp_path):
    """It was waiting for its group, which is not complete any more; its reward is gone."""
    groups = {0: [VF01, {2: [-1.0]}]}
    updated = {(0, 0): VF01_UPDATED, (0, 1): [-1.0]}
    buffer, state = run(groups, updated, tmp_path, group_size=2, finish=[(0, 0), (0, 1)])
    assert [int(one["status"]) for one in state.unfinished] == [Status.UNFINISHED, Status.STOP]
    assert [float(one["reward"]) for one in state.unfinished] == [0.0, 1.0]
    assert buffer.num_complete == 0
    assert buffer.counts.cut == 2


def test_everything_is_stamped_with_the_version_it_was_verified_against(tmp_path):
    groups = {0: [VF01, {2: [-1.0]}, {}]}
    updated = {(0, 0): VF01_UPDATED, (0, 1): [-1.0]}
    _, state = run(groups, updated, tmp_path, group_size=3)
    assert [int(one["verified_version"]) for one in state.unfinished] == [3, 3, 3]


def test_kept_tokens_keep_what_they_carry(tmp_path):
    _, state = run({0: [VF01]}, {(0, 0): VF01_UPDATED}, tmp_path)
    (one,) = state.unfinished
    assert one["behavior_logprobs"].tolist() == pytest.approx([-0.1, -0.2])
    assert one["anchor_logprobs"].tolist() == pytest.approx([-0.1, -0.2])
    assert one["policy_version"].tolist() == [0, 0]


def test_metrics_by_hand(tmp_path):
    """4 tokens cut to 2, 2 tokens cut to 0, 1 kept, and one that has not begun: 3 of 7 are left."""
    groups = {0: [VF01, {2: [-1.0, -4.0]}, {2: [-1.0]}, {}]}
    updated = {(0, 0): VF01_UPDATED, (0, 1): [-1.0, -1.0], (0, 2): [-1.0]}
    _, state = run(groups, updated, tmp_path, thresholds=(0.3, 2.0), group_size=4)
    assert lengths(state.unfinished) == [2, 0, 1, 0]
    found = {key: state.metrics[key] for key in state.metrics if key.startswith("verification/")}
    assert found.pop("verification/scan_s") > 0
    assert found.pop("verification/scoring_s") > 0
    assert found == {
        "verification/acceptance_rate": 3 / 7,
        "verification/untouched_frac": 2 / 4,
        "verification/cuts_segment": 2,
        "verification/cuts_token": 0,
        "verification/tokens_checked": 7,
        "verification/tokens_cut": 4,
    }
    assert all(is_declared(key) for key in state.metrics)


def test_cuts_of_the_token_stage_are_counted_apart(tmp_path):
    updated = {(0, 0): [-1.0, -1.0]}
    _, state = run({0: [{2: [-1.0, -4.0]}]}, updated, tmp_path, thresholds=(10.0, 2.0))
    assert state.metrics["verification/cuts_segment"] == 0
    assert state.metrics["verification/cuts_token"] == 1
    assert state.metrics["verification/acceptance_rate"] == 0.5


@pytest.mark.parametrize("groups", [{}, {0: [{}]}])
def test_nothing_or_only_empty_responses_are_verified_and_not_cut(groups, tmp_path):
    """PR15: kept in U_k with 0 segments, verified, nothing cut, no NaN."""
    _, state = run(groups, {}, tmp_path)
    assert [int(one["verified_version"]) for one in state.unfinished] == [3] * len(groups)
    assert state.metrics["verification/acceptance_rate"] == 1.0
    assert state.metrics["verification/untouched_frac"] == 1.0
    assert all(isfinite(value) for value in state.metrics.values())
    assert cuts_in(tmp_path) == []


def test_infinite_thresholds_cut_nothing(tmp_path):
    infinite = (float("inf"), float("inf"))
    _, state = run({0: [VF01]}, {(0, 0): VF01_UPDATED}, tmp_path, thresholds=infinite)
    assert lengths(state.unfinished) == [4]


def test_a_policy_that_did_not_move_cuts_nothing(tmp_path):
    """OPS 0 at any threshold."""
    updated = {(0, 0): [*VF01[0], *VF01[1]]}
    _, state = run({0: [VF01]}, updated, tmp_path, thresholds=(1e-30, 1e-30))
    assert lengths(state.unfinished) == [4]


def test_what_a_filter_has_dropped_counts_as_checked_and_lost(tmp_path):
    """4 tokens: 2 of sample 0 are too old, 2 of sample 1 are verified and kept."""
    groups = {0: [{0: [-1.0, -1.0]}, {2: [-1.0, -1.0]}]}
    buffer, ledger, state = held_in(groups, group_size=2)
    verification(
        scoring({(0, 0): [-1.0, -1.0], (0, 1): [-1.0, -1.0]}),
        buffer,
        ledger,
        filtered=FilterConfig(name="staleness", max_staleness=1),
        audit_log=AuditLog(tmp_path, rank=0),
    )(state)
    assert state.metrics["verification/tokens_checked"] == 4
    assert state.metrics["verification/acceptance_rate"] == state.acceptance_rate == 0.5
    assert state.metrics["verification/untouched_frac"] == 0.5
    assert state.metrics["verification/tokens_cut"] == 0
