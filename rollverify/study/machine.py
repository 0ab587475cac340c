"""When, where and how a study was started, kept beside its runs for the report."""

import json
import os
import platform
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from rollverify.study.plan import REPOSITORY

STARTS_FILE = "starts.jsonl"


def this_start(argv: Sequence[str]) -> dict[str, str]:
    """Date, command, code and machine of a study that starts now.

    Args:
        argv: command line without the program.
    """
    load = os.getloadavg()[0]
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": shlex.join(["python", "-m", "rollverify.study", *argv]),
        "commit": _commit(),
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "load before": f"{load:.1f}",
    }


def note_start(folder: Path, start: dict[str, str]) -> None:
    """Append a start to the study's log of them."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / STARTS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(start) + "\n")


def known_starts(folder: Path) -> list[dict[str, str]]:
    """Every start of the study so far."""
    file = folder / STARTS_FILE
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _commit() -> str:
    """Commit of the code, with a mark if files differ from it; "unknown" without git."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    """Name of the processor as the kernel gives it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
