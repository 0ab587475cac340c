"""Worker processes that answer calls within a limit of time and memory, from any thread.

A server process, a fresh interpreter, loads what the workers share and forks them: one that hangs,
dies or runs out of memory costs its call and milliseconds. The server ends when its parent does.
"""

import contextlib
import importlib
import json
import multiprocessing
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from rollverify.errors import ConfigError, RewardError

START_LIMIT_S = 180.0
"""Seconds that a worker may take to load its libraries, on a machine that is busy."""

CALLS_PER_WORKER = 20_000
"""Calls after which a worker is replaced, so that caches of libraries cannot grow for ever."""

_SERVER = (
    "import json, sys; options = json.loads(sys.argv[1]); sys.path[:] = options.pop('path'); "
    "from rollverify.rewards.pool import serve; serve(**options)"
)


class Reply(NamedTuple):
    """What became of a call."""

    kind: str
    """answer; error: it raised, or its process ended; timeout."""
    value: Any = None
    """The answer, or a word on the error."""


class WorkerPool:
    """Up to n processes, each answering one call at a time; they start when first needed.

    `task` is "module:function", called once in the server with `arguments`. It returns a function
    that each worker calls once, and that returns what answers the calls. `time_out_s` is the limit
    of one call, `memory_bytes` of a worker's address space.
    """

    def __init__(
        self,
        task: str,
        *arguments: str,
        num_workers: int,
        time_out_s: float,
        memory_bytes: int | None = None,
    ) -> None:
        self.num_workers = num_workers
        self.time_out_s = time_out_s
        self._options = {"task": task, "arguments": arguments, "memory_bytes": memory_bytes}
        self._free: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(num_workers):
            self._free.put(None)
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket
        self._is_closed = False

    def ask(self, *arguments: Any) -> Reply:
        """Have a worker answer a call, and wait for it; a ConfigError if none can start."""
        while True:
            worker, reply = self._free.get(), _ENDED
            is_fresh = worker is None  # else it may have ended before this call
            try:
                worker = worker or self._start()
                worker.connection.send(arguments)
                in_time = worker.connection.poll(self.time_out_s)
                reply = worker.connection.recv() if in_time else Reply("timeout")
            except (EOFError, OSError):
                reply = _ENDED
            finally:
                if worker and reply.kind != "answer":
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker.pid, signal.SIGKILL)
                    worker.connection.close()
                    worker = None
                self._free.put(worker)
            if is_fresh or reply is not _ENDED:
                return reply

    def check(self) -> None:
        """Start a worker if none is free; raises a ConfigError if it cannot."""
        worker = self._free.get()
        try:
            worker = worker or self._start()
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """End all processes; a call that is under way gets no answer."""
        with self._lock:
            self._is_closed = True
            self._end_server()

    def _end_server(self) -> None:
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
            self._channel.close()

    def _start(self) -> "_Worker":
        ours, theirs = multiprocessing.Pipe()
        with self._lock, theirs:
            if self._is_closed:
                raise RewardError("a response was graded after the end of the run")
            is_first = self._server is None or self._server.poll() is not None
            if is_first:
                self._start_server()
            server = self._server
            with contextlib.suppress(OSError):  # then `ours` ends, too
                socket.send_fds(self._channel, [b"w"], [theirs.fileno()])
        ready = Reply("error", f"a worker of data.reward took over {START_LIMIT_S:g} s to start")
        try:
            if ours.poll(START_LIMIT_S):
                ready = ours.recv()
        except (EOFError, OSError):
            ready = Reply(
                "error",
                "a worker of data.reward ended at its start (its own message is above); install "
                "what is missing or choose another reward",
            )
            with self._lock:
                if self._server is server:
                    self._end_server()
            if not is_first:
                return self._start()
        if ready.kind == "error":
            raise ConfigError(ready.value)
        return _Worker(ours, ready.value)

    def _start_server(self) -> None:
        self._channel, theirs = socket.socketpair()
        options = {"path": sys.path, "channel": theirs.fileno(), "parent": os.getpid()}
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-u", "-c", _SERVER, json.dumps(options | self._options)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # its group is ended as one, and Ctrl-C does not reach it
                # Seeded hashes: SymPy's order of terms, and so its way to a result, is the same.
                env={**os.environ, "PYTHONHASHSEED": "0"},
            )


class _Worker(NamedTuple):
    connection: Connection
    pid: int


_ENDED = Reply("error", "its process ended")


def serve(
    *, task: str, arguments: list[str], memory_bytes: int | None, channel: int, parent: int
) -> None:
    """Fork a worker for every socket that comes through the channel, while the parent lives."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # meant for the run, which closes the channel
    module, _, name = task.partition(":")
    start_worker = getattr(importlib.import_module(module), name)(*arguments)
    requests = socket.socket(fileno=channel)
    requests.settimeout(1.0)
    while os.getppid() == parent:
        try:
            _, sockets, _, _ = socket.recv_fds(requests, 1, 1)
        except TimeoutError:
            continue
        if not sockets:
            break
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        connection = Connection(sockets[0])
        if os.fork() == 0:
            try:
                requests.close()
                _work(connection, start_worker, memory_bytes)
            finally:
                os._exit(0)
        connection.close()
    os.killpg(0, signal.SIGKILL)


def _work(
    connection: Connection,
    start_worker: Callable[[], Callable[..., Any]],
    memory_bytes: int | None,
) -> None:
    """Answer calls until one raises or nobody asks any more."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    try:
        answer = start_worker()
    except ConfigError as error:
        connection.send(Reply("error", str(error)))
        return
    connection.send(Reply("answer", os.getpid()))
    with contextlib.suppress(EOFError, BrokenPipeError):
        for _ in range(CALLS_PER_WORKER):
            arguments = connection.recv()
            try:
                reply = Reply("answer", answer(*arguments))
            except Exception as error:  # no more calls: caches may be half filled
                connection.send(Reply("error", type(error).__name__))
                return
            connection.send(reply)
