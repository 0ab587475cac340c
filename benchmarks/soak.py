"""A long run that is stopped, frozen and killed at random: `python -m benchmarks.soak`.

RollVerify on a tiny model with the real engine. At random moments the run is frozen for a while,
asked to stop, or killed with its launcher or its rank, and then resumed. At the end every step must
be there once, every prompt and token accounted for, the memory flat and no process left.
"""

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.isolated import child_environment
from rollverify.metrics.recorder import METRICS_FILE

FLAGS = {
    "prepare.num-functions": 2,
    "prepare.num-states": 12,
    "prepare.max-steps": 6,
    "prepare.median-steps": 3.0,
    "prepare.num-train-problems": 64,
    "prepare.num-test-problems": 8,
    "prepare.sft-steps": 150,
    "rollout.prompts-per-step": 4,
    "rollout.group-size": 2,
    "rollout.max-response-tokens": 40,
    "engine.max-num-seqs": 16,
    "engine.max-num-batched-tokens": 512,
    "evaluation.enable": "false",
    "switching.enable": "false",
    "checkpoint.every-steps": 5,
    "training.lr": 1e-3,
}
FATES = ("trained", "cut", "discarded", "filtered", "dropped", "held")
ENDINGS = ("freeze", "stop", "kill rank", "kill launcher")
STEPS_BETWEEN = (5, 20)
DISTURBED_SHARE = 0.4
"""Of the steps; the rest runs through, so that slow growth of memory can be seen."""
MEMORY_TOLERANCE = 0.05
STARTUP_LIMIT_S = 180
END_LIMIT_S = 20


def processes_of(workspace: Path) -> list[psutil.Process]:
    """RollVerify's processes with the workspace on their command line."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        is_ours = any(word.startswith("rollverify.") for word in words)
        if is_ours and any(str(workspace) in word for word in words):
            found.append(process)
    return found


def start(workspace: Path, num_steps: int, resume: Path | None) -> subprocess.Popen[bytes]:
    """Start or resume the run."""
    flags = FLAGS | {"training.steps": num_steps, "prepare.cache-dir": workspace / "base"}
    if resume is None:
        flags["run.output-dir"] = workspace / "runs"
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    words += ["--resume", str(resume)] if resume is not None else []
    with (workspace / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "rollverify.launch", "--nproc", "1", "--", *words],
            env=child_environment(),
            stdout=log,
            stderr=log,
        )


def read_records(workspace: Path) -> list[dict[str, float]]:
    """Records of the run so far; a line that is being written is left out."""
    records = []
    for file in (workspace / "runs").glob(f"*/{METRICS_FILE}"):
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return records


def wait_for(job: subprocess.Popen[bytes], workspace: Path, step: int) -> bool:
    """Wait until a step is logged; False if the job ends before."""
    deadline = time.monotonic() + STARTUP_LIMIT_S
    seen = 0
    while job.poll() is None:
        newest = max((int(record["step"]) for record in read_records(workspace)), default=0)
        if newest >= step:
            return True
        if newest > seen:
            seen, deadline = newest, time.monotonic() + STARTUP_LIMIT_S
        if time.monotonic() > deadline:
            raise RuntimeError(f"no step for {STARTUP_LIMIT_S} s; see {workspace / 'log.txt'}")
        time.sleep(0.05)
    return False


def disturb(job: subprocess.Popen[bytes], workspace: Path, how: str, stream: random.Random) -> None:
    """Freeze, stop or kill the run."""
    time.sleep(stream.uniform(0.0, 0.5))  # somewhere within a step
    ranks = [p for p in processes_of(workspace) if "rollverify.train" in p.cmdline()]
    if how == "freeze":
        for process in ranks:
            process.send_signal(signal.SIGSTOP)
        time.sleep(stream.uniform(0.5, 2.0))
        for process in ranks:
            process.send_signal(signal.SIGCONT)
    elif how == "stop":
        job.send_signal(signal.SIGTERM)
    elif how == "kill launcher":
        job.kill()
    else:
        for process in ranks:
            process.kill()


def end_of(job: subprocess.Popen[bytes], workspace: Path) -> None:
    """Wait for the job's end and make sure that nothing of it is left.

    Raises:
        RuntimeError: naming what is still running.
    """
    job.wait(timeout=STARTUP_LIMIT_S)
    deadline = time.monotonic() + END_LIMIT_S
    while left := processes_of(workspace):
        if time.monotonic() > deadline:
            raise RuntimeError(f"still running: {[process.cmdline()[:4] for process in left]}")
        time.sleep(0.1)


def memory_growth(records: list[dict[str, float]], starts: list[int]) -> float:
    """Largest relative growth of the resident memory within one process's life.

    The first steps of a process, in which caches fill, are left out.
    """
    growth = 0.0
    for first, end in zip(starts, [*starts[1:], int(records[-1]["step"]) + 1], strict=True):
        sizes = [r["memory/rss_gib"] for r in records if first + 5 <= r["step"] < end]
        if len(sizes) >= 10:
            part = max(5, len(sizes) // 5)
            early, late = statistics.mean(sizes[:part]), statistics.mean(sizes[-part:])
            growth = max(growth, late / early - 1)
    return growth


def check(records: list[dict[str, float]], num_steps: int) -> list[str]:
    """What is wrong with the finished run, if anything."""
    wrong = []
    if [int(record["step"]) for record in records] != list(range(1, num_steps + 1)):
        wrong.append("steps are missing or repeated")
    for record in records:
        held = sum(record[f"ledger/{state}"] for state in ("paused", "pending", "filtered"))
        if record["progress/num_prompts"] != record["ledger/trained"] + held:
            wrong.append(f"step {record['step']:.0f}: a prompt is lost")
        if record["tokens/generated"] != sum(record[f"tokens/{fate}"] for fate in FATES):
            wrong.append(f"step {record['step']:.0f}: a token is lost")
    return wrong


def main() -> None:
    """Run, disturb, resume, check; exit code 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description="A long run, stopped and killed at random.")
    parser.add_argument("workspace", type=Path, help="empty folder for the run")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    workspace: Path = arguments.workspace.resolve()
    workspace.mkdir(parents=True, exist_ok=True)
    stream = random.Random(arguments.seed)
    done: dict[str, int] = dict.fromkeys(ENDINGS, 0)
    starts, folder, target = [1], None, 0
    job = start(workspace, arguments.steps, None)
    while True:
        target += stream.randint(*STEPS_BETWEEN)
        if target > DISTURBED_SHARE * arguments.steps:
            target = arguments.steps
        if not wait_for(job, workspace, target) or target == arguments.steps:
            break
        how = stream.choice(ENDINGS)
        disturb(job, workspace, how, stream)
        done[how] += 1
        if how == "freeze":
            continue
        end_of(job, workspace)
        (folder,) = (workspace / "runs").iterdir()
        steps = [int(name.name[5:]) for name in (folder / "checkpoints").glob("step-*")]
        starts.append(max(steps) + 1)
        job = start(workspace, arguments.steps, folder)
    end_of(job, workspace)
    _report(workspace, arguments.steps, job.returncode, done, starts)


def _report(
    workspace: Path, num_steps: int, code: int, done: dict[str, int], starts: list[int]
) -> None:
    records = sorted(read_records(workspace), key=lambda record: record["step"])
    wrong = check(records, num_steps)
    growth = memory_growth(records, starts)
    if growth > MEMORY_TOLERANCE:
        wrong.append(f"memory grew by {100 * growth:.1f} %")
    if code:
        wrong.append(f"the last process ended with code {code}")
    last: dict[str, Any] = records[-1]
    print(f"{len(records)} steps, {', '.join(f'{num} x {how}' for how, num in done.items())}")
    print(f"largest growth of resident memory in one process: {100 * growth:.1f} %")
    print(f"tokens: { {fate: int(last[f'tokens/{fate}']) for fate in ('generated', *FATES)} }")
    print("\n".join(wrong) or "nothing lost, nothing left running")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
