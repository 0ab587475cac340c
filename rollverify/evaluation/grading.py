"""Grades responses in threads, so that a slow comparison holds up neither the engine nor others.

Which thread finishes first changes the order of records, never what they hold. Does not compare
answers itself, and writes no file.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from rollverify.engine.engine import Completion
from rollverify.evaluation.records import ProblemRecord


class BackgroundGrading:
    """Grades and writes whole problems while the engine goes on; a context manager.

    Leaving it without an error waits for what is being graded; with one, only for the comparisons
    that have begun.
    """

    def __init__(
        self,
        grade: Callable[[int, Sequence[Completion]], ProblemRecord],
        write: Callable[[ProblemRecord], None],
        num_threads: int,
    ) -> None:
        """Set up.

        Args:
            grade: a problem's index and completions -> its record; called in threads.
            write: takes each record once, as soon as it is there; one call at a time, in threads.
            num_threads: problems graded at once; 0 grades in `add`, in the caller's thread.
        """
        self._grade = grade
        self._write = write
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(num_threads, "grading") if num_threads else None
        self._begun: list[Future[None]] = []

    def add(self, index: int, completions: Sequence[Completion]) -> None:
        """Grade and write a problem, soon where there are threads.

        Raises:
            Exception: what an earlier problem raised, or this one without threads.
        """
        if self._threads is None:
            self._finish(index, completions)
            return
        self._begun.append(self._threads.submit(self._finish, index, completions))
        for one in [one for one in self._begun if one.done()]:
            self._begun.remove(one)
            one.result()

    def _finish(self, index: int, completions: Sequence[Completion]) -> None:
        record = self._grade(index, completions)
        with self._lock:
            self._write(record)

    def __enter__(self) -> "BackgroundGrading":
        """Begin."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait, unless an error is on its way, then end the threads."""
        try:
            if kind is None:
                for one in self._begun:
                    one.result()
        finally:
            if self._threads is not None:
                self._threads.shutdown(cancel_futures=True)
