"""The main job on two ranks: the switch to on-policy, kills in every phase, fewer ranks later."""

import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from integration.jobs import (
    assert_nothing_lost,
    assert_same_run,
    finish,
    finish_killed,
    folder_of,
    in_flight,
    records,
    start,
    wait_for_step,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.distributed]

SWITCH = {"switching.window": 5, "switching.threshold": 1.0, "checkpoint.keep": 3}
"""Any cut within five steps ends partial rollouts."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which all runs of this module live; the base model is made by the first."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def two_ranks(workspace: Path) -> Path:
    """Folder of a run on two ranks that nothing interrupts; it switches to on-policy in step 5."""
    finish(start(workspace, "two", ranks=2, settings=SWITCH))
    return folder_of(workspace, "two")


def test_no_prompt_and_no_token_is_lost(two_ranks: Path) -> None:
    assert_nothing_lost(two_ranks)


def test_ranks_switch_to_on_policy_together_and_their_prompts_come_back(two_ranks: Path) -> None:
    rows = records(two_ranks)
    assert [rows[step]["switching/is_on_policy"] for step in range(1, 7)] == [0, 0, 0, 0, 1, 1]
    dropped = rows[5]["ledger/num_dropped"]
    assert dropped == rows[5]["ledger/pending"] > 0 == rows[5]["tokens/held"]
    assert rows[6]["staleness/trained_max"] == rows[6]["rollout/num_unfinished"] == 0
    assert rows[6]["ledger/pending"] == max(0, dropped - 4)


def test_two_ranks_killed_before_and_after_the_switch_equal_the_uninterrupted_run(
    two_ranks: Path, workspace: Path
) -> None:
    """In every phase, of one rank or the other, and inside a checkpoint.

    Compared with what is in flight after step 4: the switch of step 5 drops it.
    """
    assert all(row["sync/parity_abs_max"] <= 1e-5 for s, row in records(two_ranks).items() if s)
    options: dict[str, Any] = {"ranks": 2, "settings": SWITCH}
    finish_killed(start(workspace, "two-broken", kill_at="rollout:3:1", **options))
    folder = folder_of(workspace, "two-broken")
    for place in ("train:3:0", "sync:4:1", "verify:5:0", "checkpoint:6:0"):
        job = start(workspace, "two-broken", "--resume", str(folder), kill_at=place, **options)
        finish_killed(job)
    finish(start(workspace, "two-broken", "--resume", str(folder), **options))
    assert_same_run(folder, two_ranks, ranks=2, step=4)
    assert all(in_flight(folder, rank, 4)[0] for rank in range(2))


def test_one_engine_over_two_ranks_killed_and_resumed_equals_the_uninterrupted_run(
    workspace: Path,
) -> None:
    """Both ranks train on a part of what they have rolled out together."""
    settings = {"engine.tensor_parallel": 2, "training.steps": 4, "switching.enable": "false"}
    options: dict[str, Any] = {"ranks": 2, "settings": settings}
    finish(start(workspace, "shared", **options))
    whole = folder_of(workspace, "shared")
    assert_nothing_lost(whole)
    rows = records(whole)
    assert all(row["sync/parity_abs_max"] <= 1e-5 for step, row in rows.items() if step)
    assert rows[4]["rollout/num_resumed"] > 0 < rows[4]["verification/tokens_checked"]
    finish_killed(start(workspace, "shared-broken", kill_at="rollout:3:1", **options))
    folder = folder_of(workspace, "shared-broken")
    finish(start(workspace, "shared-broken", "--resume", str(folder), **options))
    assert_same_run(folder, whole, step=4)


def test_a_rollout_that_will_not_end_in_time_is_paused_and_saved_at_a_signal(
    workspace: Path,
) -> None:
    """On both ranks: an engine step takes a second. The resumed run goes on with all of it."""
    settings = {"training.steps": 3, "rollout.count_every": 1}
    options: dict[str, Any] = {"ranks": 2, "settings": settings, "grace_s": 6.0}
    job = start(workspace, "preempted", kill_at="slow:3:1", **options)
    folder = wait_for_step(workspace, "preempted", 2)
    time.sleep(1.0)
    before, begin = records(folder)[2], time.monotonic()
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=60)
    # The launcher's patience, and what it takes to end the processes.
    assert job.returncode == 143 and time.monotonic() - begin < 6 + 3, output[-2000:]
    assert "the rollout was paused" in output and max(records(folder)) == 2
    held = [in_flight(folder, rank, 2)[1]["buffer"]["generated"] for rank in range(2)]
    assert sum(held) > before["tokens/generated"]
    finish(start(workspace, "preempted", "--resume", str(folder), **options))
    assert_nothing_lost(folder)
    last = records(folder)[3]
    assert last["tokens/generated"] == sum(held) + last["rollout/num_tokens"]


def test_one_rank_goes_on_where_two_ranks_stopped(two_ranks: Path, workspace: Path) -> None:
    folder = workspace / "taken-over" / "run"
    shutil.copytree(two_ranks, folder)
    for step in (4, 6):
        shutil.rmtree(folder / "checkpoints" / f"step-{step}")
    shorter = {"training.steps": 3, "switching.enable": "false"}
    output = finish(start(workspace, "taken-over", "--resume", str(folder), settings=shorter))
    assert "2 data ranks wrote the checkpoint; dealt out over 1" in output
    before, after = records(two_ranks)[2], records(folder)[3]
    assert after["ledger/trained"] == 4 * 3
    assert after["rollout/num_resumed"] > 0
    assert after["tokens/generated"] == before["tokens/generated"] + after["rollout/num_tokens"]
