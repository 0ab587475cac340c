"""The maths worker's process with a comparison that misbehaves as the answer says."""

import os
import signal
import sys

from rollverify.rewards.math_worker import serve

_state: list[str] = []


def compare(gold: str, answer: str) -> str:
    match answer:
        case "C code":
            str(10 ** (10**9))
        case "loop":
            while True:
                _state.append("")
                _state.clear()
        case "memory":
            bytearray(4 << 30)  # never touched, so only a limit refuses it
        case "recursion":
            compare(gold, answer)
        case "error":
            raise ValueError("cannot compare")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "output":
            print("noise", flush=True)
        case "poison":
            _state.append("poison")
    return "right" if not _state else "poisoned"


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1:], compare))
