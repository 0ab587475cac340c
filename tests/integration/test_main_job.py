"""The main job as a user starts it: launcher, real engine, real trainer, real checkpoints.

One tiny base model and one uninterrupted run serve all tests of this module.
"""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from integration.jobs import (
    START_LIMIT_S,
    STEPS,
    assert_nothing_lost,
    assert_same_run,
    finish,
    finish_killed,
    folder_of,
    records,
    start,
    wait_for_step,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which all runs of this module live; the base model is made by the first."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole_run(workspace: Path) -> tuple[Path, str]:
    """(folder, output) of a run that nothing interrupts."""
    output = finish(start(workspace, "whole"))
    return folder_of(workspace, "whole"), output


def test_main_job_leaves_config_metrics_report_and_model(whole_run: tuple[Path, str]) -> None:
    folder, output = whole_run
    assert json.loads((folder / "config.json").read_text())["training"]["steps"] == STEPS
    assert sorted(records(folder)) == list(range(STEPS + 1))
    assert "mean@2" in output and "greedy accuracy" in output
    assert (folder / "report.txt").read_text().strip() in output
    assert list((folder / "tb").glob("events.*"))


def test_engine_and_trainer_agree_at_every_step(whole_run: tuple[Path, str]) -> None:
    rows = [row for step, row in records(whole_run[0]).items() if step > 0]
    # Float32 on both sides: the bound for the parity of sampled tokens, of any age.
    assert all(row["mismatch/logprob_abs_max"] <= 1e-5 for row in rows)
    assert all(row["sync/parity_abs_max"] <= 1e-5 for row in rows)


def test_responses_are_paused_verified_cut_and_resumed(whole_run: tuple[Path, str]) -> None:
    rows = [row for step, row in records(whole_run[0]).items() if step > 0]
    assert all(row["rollout/num_unfinished"] > 0 for row in rows)
    assert all(row["rollout/num_resumed"] > 0 for row in rows[1:])
    assert sum(row["verification/tokens_cut"] for row in rows) > 0
    assert all(row["ops/trained_age_0"] == 0.0 for row in rows)
    cuts = [json.loads(line) for line in (whole_run[0] / "cuts.jsonl").read_text().splitlines()]
    assert sum(cut["cut_tokens"] for cut in cuts) == rows[-1]["tokens/cut"]
    assert all(cut["ops"] >= 0.01 and cut["policy_version"] == cut["step"] for cut in cuts)


def test_no_prompt_and_no_token_is_lost(whole_run: tuple[Path, str]) -> None:
    assert_nothing_lost(whole_run[0])


def test_exported_model_loads_in_transformers_and_differs_from_the_base(
    whole_run: tuple[Path, str], workspace: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(whole_run[0] / "model")
    (base_folder,) = (workspace / "base").iterdir()
    base = AutoModelForCausalLM.from_pretrained(base_folder)
    trained, before = model.state_dict(), base.state_dict()
    assert trained.keys() == before.keys()
    assert any(not trained[name].equal(before[name]) for name in trained)
    assert AutoTokenizer.from_pretrained(whole_run[0] / "model").vocab_size == 80


def test_run_stopped_then_killed_around_checkpoints_equals_the_uninterrupted_run(
    whole_run: tuple[Path, str], workspace: Path
) -> None:
    """SIGTERM, then kill -9 right after a checkpoint and inside one; resumed each time.

    Its checkpoints are written in the background, those of the other run are not.

    The phases are killed with two ranks, in test_main_job_ranks.py.
    """
    beside: dict[str, Any] = {"settings": {"checkpoint.in_background": "true"}}
    job = start(workspace, "broken", **beside)
    folder = wait_for_step(workspace, "broken", 1)
    job.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 143, output[-2000:]
    assert time.monotonic() - begin < 10
    last = max(records(folder))
    assert (folder / "checkpoints" / f"step-{last}" / ".metadata").is_file()
    for place in ("saved:4", "checkpoint:6"):
        job = start(workspace, "broken", "--resume", str(folder), kill_at=f"{place}:0", **beside)
        finish_killed(job)
    assert not (folder / "checkpoints" / f"step-{STEPS}" / ".metadata").exists()
    finish(start(workspace, "broken", "--resume", str(folder), **beside))
    assert_same_run(folder, whole_run[0])


def test_a_filter_with_the_engines_log_probs_and_masked_old_tokens(workspace: Path) -> None:
    """The options that the other jobs of this module leave alone, together."""
    settings = {
        "training.steps": 4,
        "method.name": "partial_rollout",
        "verification.against": "behavior",
        "filter.name": "staleness",
        "filter.max_staleness": 1,
        "filter.discard": "group",
        "rollout.mask_older_segments": "true",
        "switching.enable": "false",
        "evaluation.enable": "false",
    }
    finish(start(workspace, "filtered", settings=settings))
    rows = records(folder_of(workspace, "filtered"))
    last = rows[4]
    assert last["ledger/filtered"] == sum(row["filter/groups_discarded"] for row in rows.values())
    assert last["tokens/filtered"] > 0 == last["tokens/cut"]
    assert last["progress/num_prompts"] == sum(
        last[f"ledger/{state}"] for state in ("trained", "paused", "filtered")
    )
    # A finished response may have waited a step for its group; nothing older passes the filter.
    assert all(row["staleness/trained_max"] <= 1 for row in rows.values())
    # The engine's mismatch is told apart from staleness, also without the trainer's anchors.
    assert all(row["mismatch/logprob_abs_max"] <= 1e-5 for row in rows.values())


def test_refused_resume_leaves_the_run_as_it_was(
    whole_run: tuple[Path, str], workspace: Path
) -> None:
    folder, _ = whole_run
    before = {name: (folder / name).read_bytes() for name in ("config.toml", "metrics.jsonl")}
    other = {"prepare.hidden_size": 32, "prepare.sft_steps": 2, "training.steps": STEPS + 1}
    other |= {"prepare.cache_dir": workspace / "other-base"}
    job = start(workspace, "whole", "--resume", str(folder), settings=other)
    output, _ = job.communicate(timeout=START_LIMIT_S)
    assert job.returncode == 2, output[-2000:]
    assert "belongs to another model" in output.splitlines()[-1]
    assert {name: (folder / name).read_bytes() for name in before} == before
