"""A worker pool's task that does what it is asked to, most of it bad."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from rollverify.rewards import pool

_state: list[str] = []


def worker_start() -> Callable[[], Callable[[str], Any]]:
    return lambda: answer


def short_lived() -> Callable[[], Callable[[str], Any]]:
    pool.CALLS_PER_WORKER = 2
    return worker_start()


def answer(what: str) -> Any:
    match what:
        case "pid":
            return os.getpid()
        case "modules":
            return list(sys.modules)
        case "sleep in a process":
            return subprocess.Popen(["sleep", "600"]).pid
        case "C code":
            str(10 ** (10**9))
        case "loop":
            while True:
                _state.append("")
                _state.clear()
        case "memory":
            bytearray(4 << 30)  # never touched, so only a limit refuses it
        case "recursion":
            answer(what)
        case "error":
            raise ValueError("cannot compare")
        case "end":
            os._exit(0)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "nap":
            time.sleep(0.5)
        case "poison":
            _state.append("poison")
        case _:
            pass
    return "poisoned" if _state else what
