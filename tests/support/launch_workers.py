"""Stand-in workers for tests of the launcher, and what looks after their processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

DRIVER = """
import sys
from rollverify.launch.launcher import Modules, launch
ranks, prepare, *argv = sys.argv[1:]
modules = Modules(train="train_worker", prepare="prepare_worker")
sys.exit(launch(argv, int(ranks), needs_prepare=prepare == "prepare", modules=modules))
"""

GUARDED = """
import os, sys, time
from rollverify.errors import DataError
from rollverify.launch.shutdown import StopRequest, write_rank_error
rank = int(os.environ["RANK"])
try:
{body}
except BaseException as error:
    sys.exit(write_rank_error(error))
"""

FAMILY = """
import os, pathlib, signal, subprocess, sys, time
{before}
code = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); input()"
child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, text=True)
lone = subprocess.Popen(["sleep", "1000"], start_new_session=True)
pids = [os.getpid(), child.pid, int(child.stdout.readline()), lone.pid]
pathlib.Path(sys.argv[1]).write_text(" ".join(map(str, pids)) + "\\n")
{after}
"""


def start_launcher(
    folder: Path,
    train: str,
    *argv: str,
    ranks: int = 1,
    prepare: str = "",
    grace_s: float = 10.0,
) -> "subprocess.Popen[str]":
    """Start the launcher; `train` and `prepare` are the sources of the stand-in workers."""
    (folder / "train_worker.py").write_text(train)
    (folder / "prepare_worker.py").write_text(prepare)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
        "ROLLVERIFY_STOP_GRACE_S": str(grace_s),
        "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", DRIVER, str(ranks), "prepare" if prepare else "-", *argv]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def guarded(*lines: str) -> str:
    """Source of a worker whose main function runs these lines and reports what they raise."""
    return GUARDED.format(body="\n".join(f"    {line}" for line in lines))


def wait_for(file: Path, timeout_s: float = 20.0) -> str:
    """The file's text, as soon as it ends with a line break."""
    deadline = time.monotonic() + timeout_s
    while not (file.exists() and file.read_text().endswith("\n")):
        assert time.monotonic() < deadline, f"{file.name} did not appear"
        time.sleep(0.02)
    return file.read_text()


def is_running(pid: int) -> bool:
    """False for ended processes, and for those that only wait to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: list[int], timeout_s: float) -> list[int]:
    """The process ids that still run after the time given."""
    deadline = time.monotonic() + timeout_s
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def leftovers(folder: Path) -> list[str]:
    """What runs left in their folder for temporary files."""
    return [entry.name for entry in folder.iterdir() if entry.name.startswith("rollverify-")]
