"""When, where and how a study was started, kept beside its runs for the report."""

import json
import os
import platform
import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from rollverify.study.plan import REPOSITORY
from rollverify.study.status import read_lines

STARTS_FILE = "starts.jsonl"


def note_start(folder: Path, argv: Sequence[str]) -> None:
    """Append date, command, code and machine of a study that starts now to its log of starts."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    processor = re.search(r"^model name\s*:\s*(.*\S)", cpuinfo, re.MULTILINE)
    name = processor[1] if processor else platform.machine()
    start = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": shlex.join(["python", "-m", "rollverify.study", *argv]),
        "commit": _commit(),
        "machine": f"{name}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "load before": f"{os.getloadavg()[0]:.1f}",
    }
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / STARTS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(start) + "\n")


def known_starts(folder: Path) -> list[dict[str, str]]:
    """Every start of the study so far."""
    return read_lines(folder / STARTS_FILE)[0]


def _commit() -> str:
    """Commit of the code, with a mark if files differ from it; "unknown" without git."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
