"""Grades finished responses, in place or in threads beside the engine.

A response that is being graded counts as finished, with reward 0 until `settle`. So what is
generated never depends on how long grading takes. Does not know what a reward is made of.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

Grade = Callable[[], float]
"""Gives the reward of one response."""

Store = Callable[[float], None]
"""Takes it."""


class ResponseGrading:
    """The gradings of one rollout phase."""

    def __init__(self, num_threads: int = 0) -> None:
        """Set up.

        Args:
            num_threads: responses graded at once beside the engine; 0 grades at once and in place,
                which is faster for rewards that only compare texts.
        """
        self._threads = ThreadPoolExecutor(num_threads, "grading") if num_threads else None
        self._begun: list[tuple[Future[float], Store]] = []

    @property
    def is_beside(self) -> bool:
        """Whether responses are graded in threads."""
        return self._threads is not None

    def begin(self, grade: Grade, store: Store) -> None:
        """Grade a response.

        Args:
            grade: called once, in a thread if there are any.
            store: called once with the reward, in this thread, at the latest by `settle`.
        """
        if self._threads is None:
            store(grade())
        else:
            self._begun.append((self._threads.submit(grade), store))

    def settle(self) -> None:
        """Wait for everything that has begun and store it.

        Raises:
            Exception: what a grading raised; those after it are stored by the next call.
        """
        while self._begun:
            future, store = self._begun.pop(0)
            store(future.result())
