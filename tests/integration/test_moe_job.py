"""Jobs with experts and routing replay, as a user starts them: killed, on two ranks, changed modes.

One tiny base model serves all. Runs on one rank that nothing interrupts share a process, see
`chained_train`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from integration.jobs import (
    ROOT,
    SETTINGS,
    STEPS,
    assert_same_run,
    finish,
    finish_killed,
    folder_of,
    in_flight,
    records,
    start,
)
from support.chained_train import THEN

from rollverify.checkpoint.rank_file import load_rank_file
from rollverify.rollout.trajectory import ROUTING, is_routed

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

MOE = {
    "prepare.num_experts": 4,
    "prepare.moe_intermediate_size": 32,
    "prepare.sft_steps": 100,
    "rollout.group_size": 4,
    "routing_replay.mode": "engine",
    "evaluation.enable": "false",
}
PARITY = 1e-5
"""Float32 on both sides, the same experts: the bound for the log-probs of sampled tokens."""

_CHAIN = (
    "import sys; from rollverify.launch.launcher import Modules, launch; "
    "sys.exit(launch(sys.argv[1:], 1, needs_prepare=False, "
    "modules=Modules(train='support.chained_train')))"
)


def chain(workspace: Path, *runs: tuple[str, dict[str, Any]]) -> str:
    """Run (name, settings) one after the other in one process; returns what they print.

    On one rank only: two that make a second process group in one process can miss each other.

    The base model must be there. A name that comes again goes on from where that run ended.
    """
    words: list[str] = []
    for number, (name, settings) in enumerate(runs):
        values = SETTINGS | MOE | {"prepare.cache_dir": workspace / "base"} | settings
        values |= {"run.output_dir": workspace / name}
        words += [THEN] * (number > 0)
        words += [word for key, value in values.items() for word in (f"--{key}", str(value))]
        words += ["--resume"] * (name in [earlier for earlier, _ in runs[:number]])
    process = subprocess.Popen(
        [sys.executable, "-c", _CHAIN, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return finish(process)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all runs, with the base model and a run that was killed between two checkpoints."""
    made = tmp_path_factory.mktemp("moe")
    finish_killed(start(made, "broken", settings=MOE, kill_at="verify:3:0"))
    return made


@pytest.fixture(scope="module")
def one_rank(workspace: Path) -> str:
    """What two runs printed: "whole", and "changed", whose mode of replay changes twice."""
    changed = [
        {"training.steps": 2, "routing_replay.mode": "off"},
        {"training.steps": 4, "routing_replay.mode": "engine"},
        {"training.steps": 6, "routing_replay.mode": "trainer", "training.minibatches": 2},
    ]
    return chain(workspace, ("whole", {}), *(("changed", settings) for settings in changed))


@pytest.fixture(scope="module")
def two_ranks(workspace: Path) -> Path:
    """Folder of a run on two ranks: 4 steps sharded by FSDP, then the experts shared out as well,
    and one engine in place of two.

    Resumed responses take the rows of the new forward pass: every log-prob can be compared.
    """
    settings = MOE | {"routing_replay.on_resume": "replace"}
    finish(start(workspace, "two", settings=settings | {"training.steps": 4}, ranks=2))
    folder = folder_of(workspace, "two")
    experts = settings | {"parallelism.expert_parallel": 2, "engine.tensor_parallel": 2}
    finish(start(workspace, "two", "--resume", str(folder), settings=experts, ranks=2))
    return folder


def steps_of(folder: Path) -> list[dict[str, float]]:
    rows = records(folder)
    assert sorted(step for step in rows if step) == list(range(1, STEPS + 1))
    return [rows[step] for step in range(1, STEPS + 1)]


def assert_nothing_is_lost(rows: list[dict[str, float]]) -> None:
    for row in rows:
        fates = ("trained", "cut", "discarded", "filtered", "dropped", "held")
        assert row["tokens/generated"] == sum(row[f"tokens/{fate}"] for fate in fates)


def test_run_killed_and_resumed_equals_the_uninterrupted_run(
    one_rank: str, workspace: Path
) -> None:
    """Weights, metrics, cuts and all that is in flight, each token's experts included."""
    folder, whole = folder_of(workspace, "broken"), folder_of(workspace, "whole")
    finish(start(workspace, "broken", "--resume", str(folder), settings=MOE))
    assert_same_run(folder, whole)
    held, _ = in_flight(whole, 0)
    assert any(ROUTING in one for one in held)


def test_responses_are_cut_and_resumed_with_their_experts(one_rank: str, workspace: Path) -> None:
    rows = steps_of(folder_of(workspace, "whole"))
    assert_nothing_is_lost(rows)
    assert rows[-1]["tokens/cut"] > 0 and rows[-1]["rollout/num_resumed"] > 0
    assert all(row["sync/parity_abs_max"] <= PARITY for row in rows)
    # What is as old as the policy is told from what is not: its distance is exactly 0.
    assert all(row["ops/trained_age_0"] == 0.0 for row in rows)
    # 2 layers, 2 experts per token, one byte each.
    assert all(row["routing/bytes_per_token"] == 2 * 2 for row in rows)


@pytest.mark.distributed
def test_two_ranks_repeat_the_experts_of_their_engines(two_ranks: Path) -> None:
    """Those of two engines, then those of the one that both hold."""
    rows = steps_of(two_ranks)
    assert_nothing_is_lost(rows)
    assert all(row["mismatch/logprob_abs_max"] <= PARITY for row in rows)
    assert all(row["sync/parity_abs_max"] <= PARITY for row in rows)
    assert all(row["rollout/num_resumed"] > 0 for row in rows[1:])
    assert max(row["train/grad_norm"] for row in rows[:3]) > 0 < rows[4]["train/grad_norm"]
    config = json.loads((two_ranks / "config.json").read_text())
    assert config["parallelism"]["expert_parallel"] == config["engine"]["tensor_parallel"] == 2


def test_responses_without_experts_start_again_when_replay_begins(
    one_rank: str, workspace: Path
) -> None:
    rows = steps_of(folder_of(workspace, "changed"))
    assert_nothing_is_lost(rows)
    num_dropped = int(rows[2]["ledger/num_dropped"])
    line = f"{num_dropped} unfinished groups are dropped and start again: the experts of some"
    assert num_dropped > 0 and one_rank.count(line) == 1
    assert rows[2]["tokens/dropped"] == rows[1]["tokens/held"] > 0
    assert [row["routing/bytes_per_token"] for row in rows[:4]] == [0, 0, 4, 4]


def test_responses_keep_their_experts_when_the_trainer_records_instead(
    one_rank: str, workspace: Path
) -> None:
    """Mode trainer with two steps an iteration: every token in flight has a row, of one type."""
    folder = folder_of(workspace, "changed")
    rows = steps_of(folder)
    assert rows[-1]["ledger/num_dropped"] == rows[3]["ledger/num_dropped"]
    file = folder / "checkpoints" / f"step-{STEPS}" / "rollout-0.safetensors"
    begun = [one for one in load_rank_file(file)[0] if len(one["response_ids"])]
    assert begun and all(map(is_routed, begun))
    assert {str(one[ROUTING].dtype) for one in begun} == {"torch.uint8"}
