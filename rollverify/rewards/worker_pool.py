"""Worker processes behind a call that waits for the answer, from any thread.

A worker that hangs, dies or answers nonsense costs one request and is replaced; nothing it does
reaches this process. Workers start when they are first needed. What is asked is not known here.
"""

import itertools
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rollverify.errors import ConfigError

START_LIMIT_S = 180.0
"""Seconds that a worker may take to load its libraries, on a machine that is busy."""

GRACE_S = 1.0
"""Seconds past its time limit after which a worker that did not end itself is killed."""

_ROOT = Path(__file__).resolve().parents[2]


class WorkerPool:
    """Up to n processes of one module, each serving one request at a time."""

    def __init__(self, module: str, *, num_workers: int, time_out_s: float) -> None:
        """Set up; nothing is started yet.

        Args:
            module: name that `python -m` runs; it takes --time-out-s and --parent.
            num_workers: processes at most, >= 1.
            time_out_s: limit of one request, > 0; the worker keeps it itself.
        """
        self.num_workers = num_workers
        self.time_out_s = time_out_s
        self._module = module
        self._ids = itertools.count(1)
        self._slots: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        self._lock = threading.Lock()
        self._started: set[_Worker] = set()
        self._is_closed = False
        for _ in range(num_workers):
            self._slots.put(None)

    @property
    def process_ids(self) -> list[int]:
        """Of the workers that run now."""
        with self._lock:
            return [worker.process.pid for worker in self._started]

    def ask(self, request: dict[str, str]) -> dict[str, Any]:
        """Send a request and wait for its reply.

        Returns:
            The worker's reply, or {"verdict": "timeout"} or {"verdict": "error"}.

        Raises:
            ConfigError: if a worker does not start.
        """
        for attempt in (1, 2):
            worker = self._slots.get()
            try:
                worker = worker or self._start()
                reply = worker.ask({**request, "id": next(self._ids)}, self.time_out_s + GRACE_S)
            except BaseException:
                self._drop(worker)
                raise
            if reply is not None:
                self._slots.put(worker)
                return reply
            is_late = worker.is_late
            self._drop(worker)
            if is_late or attempt == 2:
                return {"verdict": "timeout" if is_late else "error", "why": "the worker ended"}
        raise AssertionError("unreachable")

    def ask_all(self, requests: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
        """Replies to many requests, in their order, by all workers at once."""
        num_threads = min(self.num_workers, len(requests))
        if num_threads < 2:
            return [self.ask(one) for one in requests]
        with ThreadPoolExecutor(num_threads) as threads:
            return list(threads.map(self.ask, requests))

    def close(self) -> None:
        """End all workers; a request that is under way fails."""
        with self._lock:
            self._is_closed = True
            workers = list(self._started)
            self._started.clear()
        for worker in workers:
            worker.end()

    def _start(self) -> "_Worker":
        worker = _Worker(self._module, self.time_out_s)
        with self._lock:
            if not self._is_closed:
                self._started.add(worker)
        if worker not in self._started:
            worker.end()
            raise ConfigError("grading was asked for after it was closed; grade before the end")
        try:
            worker.wait_until_ready()
        except BaseException:
            self._forget(worker)
            raise
        return worker

    def _drop(self, worker: "_Worker | None") -> None:
        """End a worker that cannot be used any more and give its place back."""
        if worker is not None:
            self._forget(worker)
        self._slots.put(None)

    def _forget(self, worker: "_Worker") -> None:
        with self._lock:
            self._started.discard(worker)
        worker.end()


class _Worker:
    """One process and its two pipes."""

    def __init__(self, module: str, time_out_s: float) -> None:
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                module,
                f"--time-out-s={time_out_s}",
                f"--parent={os.getpid()}",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Seeded hashes: SymPy's order of terms, and so its way to a result, is always the same.
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
        )
        self._module = module
        self._received = b""
        self.is_late = False
        """The last request ran into the limit."""

    def wait_until_ready(self) -> None:
        """Wait for the libraries to be loaded.

        Raises:
            ConfigError: if the process ends before that, or takes too long.
        """
        line = self._read_line(time.monotonic() + START_LIMIT_S)
        if line is None:
            how = f"took over {START_LIMIT_S:g} s"
            if not self.is_late:  # its output is closed, so it is about to end
                how = f"ended with code {self.process.wait()}"
            raise ConfigError(
                f"a worker of data.reward {how} at its start (python -m {self._module}; its own "
                "message is above); install what is missing or choose another reward"
            )

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any] | None:
        """The reply; None if there is none, and then the worker is of no more use."""
        self.is_late = False
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except (OSError, ValueError):
            return None
        deadline = time.monotonic() + limit_s
        while (line := self._read_line(deadline)) is not None:
            try:
                reply = json.loads(line)
            except ValueError:
                return None
            if reply.get("id") == request["id"]:
                return reply
        return None

    def _read_line(self, deadline: float) -> bytes | None:
        assert self.process.stdout is not None
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            try:
                readable = select.select([self.process.stdout], [], [], max(0.0, left))[0]
                piece = os.read(self.process.stdout.fileno(), 1 << 16) if readable else b""
            except (OSError, ValueError):  # closed by another thread
                return None
            if not piece:
                self.is_late = not readable
                return None
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        return line

    def end(self) -> None:
        """Kill the process; its child goes with it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # unsent bytes for a process that has ended
                    continue
