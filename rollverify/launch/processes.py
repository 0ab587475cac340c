"""Finds and ends every process of one run, however deep, by a token that all of them inherit.

`python -m rollverify.launch.processes` is the guard: it sees its launcher end, even by SIGKILL.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

TOKEN_VARIABLE = "ROLLVERIFY_RUN_TOKEN"
"""Environment variable that marks the processes of one run."""


def processes_of_run(token: str) -> set[int]:
    """Process ids that carry the token, and all their descendants; without this process."""
    needle = f"{TOKEN_VARIABLE}={token}".encode()
    parents: dict[int, int] = {}
    found: set[int] = set()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # stat: "pid (name) state parent ..."; the name may hold spaces and parentheses.
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state == "Z":
                continue
            parents[int(folder.name)] = int(parent)
            if needle in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
        except (OSError, UnicodeDecodeError):  # it has just ended, or belongs to another user
            continue
    size = -1
    while len(found) != size:  # a program may overwrite its environment with its title
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {os.getpid()}


def end_processes(token: str, *, patience_s: float = 5.0) -> bool:
    """End (SIGKILL) every process of the run; False if some are left after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while left := processes_of_run(token):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def start_guard(token: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start the guard of a run; it ends all and the folder once its stdin closes or we end."""
    environment = {key: value for key, value in os.environ.items() if key != TOKEN_VARIABLE}
    return subprocess.Popen(
        [sys.executable, "-m", "rollverify.launch.processes", token, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # Ctrl-C in the terminal does not reach it
    )


def main(argv: Sequence[str]) -> int:
    """Wait for the launcher's end, then end what is left of the run and remove its folder."""
    token, folder = argv
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    is_clean = end_processes(token)
    shutil.rmtree(folder, ignore_errors=True)
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
