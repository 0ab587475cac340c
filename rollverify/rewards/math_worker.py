"""Worker process that compares maths answers: `python -m rollverify.rewards.math_worker`.

One JSON line in, one JSON line out. The process loads SymPy once and forks a child that does the
work, so a child that is ended by its time limit is replaced in milliseconds. Time-outs, limits of
memory and the end of the parent are dealt with here; what a verdict means is not.
"""

import argparse
import contextlib
import json
import mmap
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

MEMORY_BYTES = 3 << 30
"""Address space of a child; an answer that needs more is an error of the grading."""

ANSWERS_PER_CHILD = 20_000
"""Answers after which a child is replaced, so that caches of libraries cannot grow for ever."""

WARM_UP = (
    "x+1",
    r"2\sqrt{5}-\frac{\pi}{3}",
    r"\left(3,\frac{\pi}{2}\right)",
    r"(-\infty,2)\cup[3,4]",
    r"\{1,-2,x\}",
    r"y=3x^2-4x_1+7",
    r"0<x\le 5",
    r"\begin{pmatrix}1\\2\end{pmatrix}",
    r"\tan^2(y)+\log_2 8",
    r"1\pm\sqrt{19}",
)
"""Formulas of the usual kinds."""

_CLOSED = 3
"""Exit code of a child whose input has ended."""

_FRESH = 4
"""Exit code of a child that wants to be replaced."""

_PR_SET_PDEATHSIG = 1


Compare = Callable[[str, str], str]
"""(gold, answer) -> verdict; may raise, hang or use any amount of memory."""


def main(argv: list[str]) -> int:
    """Load the libraries and serve."""
    from rollverify.rewards.math_symbolic import compare

    return serve(argv, compare, WARM_UP)


def serve(argv: list[str], compare: Compare, warm_up: Sequence[str] = ()) -> int:
    """Serve until the input is closed or the parent process has ended; return the exit code.

    Args:
        argv: command line, from `WorkerPool`.
        compare: what children do with each request.
        warm_up: formulas compared before the first child is made.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--time-out-s", type=float, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args(argv)
    replies = _private_output()  # after the imports: their errors are for people to read
    for formula in warm_up:  # children start with the parser's tables filled
        with contextlib.suppress(Exception):
            compare(formula, formula + "+0")
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the run, which closes the input
        signal.signal(number, signal.SIG_IGN)
    _watch_parent(options.parent)
    busy_with = mmap.mmap(-1, 8)
    _reply(replies, {"ready": True})
    while True:
        child = os.fork()
        if child == 0:
            _be_child(compare, replies, busy_with, options.time_out_s)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == _CLOSED:
            return 0
        request_id = int.from_bytes(busy_with, "little")
        if request_id:
            verdict = "timeout" if code == -signal.SIGALRM else "error"
            _reply(replies, {"id": request_id, "verdict": verdict, "why": f"exit code {code}"})
            busy_with[:] = bytes(8)


def _private_output() -> int:
    """Keep the output for replies alone: whatever libraries print goes nowhere."""
    replies = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return replies


def _watch_parent(parent: int) -> None:
    """End within a second of the parent; the kernel's own signal would follow its thread."""

    def check(_signal: int, _frame: FrameType | None) -> None:
        if os.getppid() != parent:
            os._exit(0)

    signal.signal(signal.SIGALRM, check)
    signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)


def _be_child(compare: Compare, replies: int, busy_with: mmap.mmap, time_out_s: float) -> None:
    """Answer requests; never returns."""
    code = 1
    try:
        _die_with(os.getppid())
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends us, even inside C code
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = _answer_all(compare, replies, busy_with, time_out_s)
    finally:
        os._exit(code)


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _answer_all(compare: Compare, replies: int, busy_with: mmap.mmap, time_out_s: float) -> int:
    """Returns the exit code."""
    for _ in range(ANSWERS_PER_CHILD):
        line = _read_line()
        if not line:
            return _CLOSED
        request = json.loads(line)
        busy_with[:] = int(request["id"]).to_bytes(8, "little")
        signal.setitimer(signal.ITIMER_REAL, time_out_s)
        reply, is_fresh_needed = {"id": request["id"]}, False
        try:
            reply["verdict"] = compare(request["gold"], request["answer"])
        except Exception as error:
            # Not a statement on the answer. Caches may be half filled after the first two.
            is_fresh_needed = isinstance(error, MemoryError | RecursionError)
            reply |= {"verdict": "error", "why": type(error).__name__}
        signal.setitimer(signal.ITIMER_REAL, 0)
        busy_with[:] = bytes(8)
        _reply(replies, reply)
        if is_fresh_needed:
            return _FRESH
    return _FRESH


def _read_line() -> bytes:
    """One request, unbuffered: what follows it belongs to whichever child is alive then."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1 << 16)
        if not piece:
            return b""
        line += piece
    return line


def _reply(replies: int, reply: dict[str, object]) -> None:
    try:
        os.write(replies, json.dumps(reply).encode() + b"\n")
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
