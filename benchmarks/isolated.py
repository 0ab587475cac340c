"""Runs one measurement in a fresh process, and shows and stores the results.

A fresh process per measurement keeps imports, caches and memory peaks of one side out of the
other's numbers. A measuring module is started as `python -m <module> --child <json>` and ends with
`answer`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from rollverify.metrics.report import summary_table

CHILD_FLAG = "--child"
ROOT = Path(__file__).parents[1]

LOAD_BEFORE = os.getloadavg()
"""Load average before the measurements: above about 1 something else was running."""


class MeasurementError(RuntimeError):
    """A measuring process failed; carries the end of what it printed."""


def child_environment(**changes: str) -> dict[str, str]:
    """This process's variables, with the repository importable and `changes` on top."""
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **changes}


def run_quietly(command: list[str], variables: dict[str, str]) -> str:
    """Run a command to its end; its output is shown only if it fails.

    Args:
        command: program and arguments.
        variables: its whole environment.

    Returns:
        Its standard output.

    Raises:
        MeasurementError: if it ends with another code than 0.
    """
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(
            command, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        if done.returncode != 0:
            errors.seek(0)
            lines = (done.stdout + errors.read()).splitlines()
            # At its end a library lists what it leaked, which would push the cause out of sight.
            said = [
                one for one in lines if not one.startswith((" - ", "nanobind:", "See https://"))
            ]
            tail = "\n".join(said[-30:])
            raise MeasurementError(f"{' '.join(command[:4])} ended with {done.returncode}:\n{tail}")
    return done.stdout


def measure(module: str, task: dict[str, Any], ranks: int = 1, **variables: str) -> dict[str, Any]:
    """Let a module measure a task in a fresh process, or in several that torchrun starts.

    Args:
        module: dotted name; its `main` handles `--child`.
        task: what to measure; must be JSON.
        ranks: processes; the first answers.
        variables: environment variables to set for it.

    Returns:
        What the module gave to `answer`.

    Raises:
        MeasurementError: if the process failed.
    """
    words = ["-m", module, CHILD_FLAG, json.dumps(task)]
    if ranks > 1:
        options = ["--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
        options += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
        words = ["-m", "torch.distributed.run", *options, *words]
    command = [sys.executable, *words]
    return json.loads(run_quietly(command, child_environment(**variables)).splitlines()[-1])


def child_task() -> dict[str, Any] | None:
    """The task of a process started by `measure`; None in any other."""
    if sys.argv[1:2] == [CHILD_FLAG]:
        return json.loads(sys.argv[2])
    return None


def answer(values: dict[str, Any]) -> NoReturn:
    """Hand the result to `measure` and end, without the teardown in which libraries print."""
    if os.environ.get("RANK", "0") == "0":
        print("\n" + json.dumps(values), flush=True)
    os._exit(0)


def report(rows: list[list[str]], values: dict[str, Any], output: Path | None) -> None:
    """Print the table and write the numbers behind it, with the load they were taken under.

    Args:
        rows: cells; the first row is the header.
        values: everything measured.
        output: JSON file, or None.
    """
    values = values | {"cores": os.cpu_count(), "load_before": LOAD_BEFORE}
    print(summary_table(rows))
    print("load average before: {:.1f} {:.1f} {:.1f}".format(*LOAD_BEFORE), flush=True)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
