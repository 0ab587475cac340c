"""Two "nodes" on one machine: a launcher each, with temporary and cache folders of its own."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from integration.jobs import (
    ROOT,
    SETTINGS,
    START_LIMIT_S,
    assert_same_run,
    folder_of,
    in_flight,
    records,
    wait_for_step,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.distributed]

STEPS = 6
Job = list["subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of all runs; what the nodes keep for themselves goes with it."""
    made = tmp_path_factory.mktemp("nodes")
    yield made
    shutil.rmtree(made, ignore_errors=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def start(workspace: Path, output: Path, *flags: str, **changes: Any) -> Job:
    """The launchers of both nodes, one rank each; `changes` of the second one's variables."""
    values = {**SETTINGS, "training.steps": STEPS, "prepare.cache_dir": workspace / "base"}
    words = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    port, job = free_port(), []
    for node in range(2):
        own = workspace / f"node-{node}"
        (own / "tmp").mkdir(parents=True, exist_ok=True)
        variables = {
            "NNODES": "2",
            "NODE_RANK": str(node),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(own / "tmp"),
            "VLLM_CACHE_ROOT": str(own / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(own / "inductor"),
        }
        folder = changes.get("second_output", output) if node else output
        output_words = [] if "--resume" in flags else ["--run.output-dir", str(folder)]
        command = [sys.executable, "-m", "rollverify.launch", "--nproc", "1", "--"]
        job.append(
            subprocess.Popen(
                [*command, *words, *output_words, *flags],
                cwd=ROOT,
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return job


def ended(job: Job) -> list[tuple[int, str]]:
    """Exit code and output of each launcher."""
    outputs = [one.communicate(timeout=START_LIMIT_S)[0] for one in job]
    return [(one.returncode, output) for one, output in zip(job, outputs, strict=True)]


@pytest.fixture(scope="module")
def whole(workspace: Path) -> Path:
    """Folder of a run that nothing interrupts."""
    results = ended(start(workspace, workspace / "whole"))
    assert [code for code, _ in results] == [0, 0], "\n".join(text[-3000:] for _, text in results)
    return folder_of(workspace, "whole")


def test_two_nodes_train_evaluate_and_export(whole: Path) -> None:
    assert (whole / "model" / "model.safetensors").is_file()
    assert (whole / "report.txt").is_file()
    assert all(in_flight(whole, rank, STEPS)[0] for rank in range(2))
    assert not list(whole.glob(".shared-*"))


def test_a_run_stopped_and_killed_on_each_node_in_turn_equals_the_whole(
    whole: Path, workspace: Path
) -> None:
    """SIGTERM to one node stops both; after kill -9 of a launcher the other names its node."""
    job = start(workspace, workspace / "broken")
    folder = wait_for_step(workspace, "broken", 1)
    job[1].send_signal(signal.SIGTERM)
    results = ended(job)
    assert [code for code, _ in results] == [143, 143], [text[-2000:] for _, text in results]
    assert "stopped by SIGTERM" in results[0][1].splitlines()[-1]
    for node in range(2):
        done = max(records(folder))
        job = start(workspace, workspace / "broken", "--resume", str(folder))
        wait_for_step(workspace, "broken", done + 1)
        job[node].kill()
        code, output = ended(job)[1 - node]
        assert code == 1, output[-3000:]
        last = output.strip().splitlines()[-1]
        assert last.startswith("error: rank") and f"node {node}" in last and "is gone" in last
    results = ended(start(workspace, workspace / "broken", "--resume", str(folder)))
    assert [code for code, _ in results] == [0, 0], "\n".join(text[-3000:] for _, text in results)
    assert_same_run(folder, whole, ranks=2, step=STEPS)


def test_a_node_that_does_not_see_the_run_folder_is_refused(workspace: Path, whole: Path) -> None:
    other = workspace / "elsewhere"
    other.mkdir()
    job = start(workspace, workspace / "apart", second_output=other)
    results = ended(job)
    assert [code for code, _ in results] == [2, 2], [text[-2000:] for _, text in results]
    for _, output in results:
        last = output.splitlines()[-1]
        assert "other settings than rank 0" in last and "run.output_dir" in last
