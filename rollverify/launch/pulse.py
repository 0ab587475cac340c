"""What each rank is doing, told to the others, so that one that says nothing can be named.

A thread of each rank writes it into the store in which the ranks met. A signal that reached one
node only goes the same way to all.
"""

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from rollverify.errors import SilentRankError
from rollverify.launch.shutdown import StopRequest
from rollverify.ranks import Ranks

logger = logging.getLogger(__name__)

EVERY_S = 2.0
"""Between two signs of life."""

NO_SIGN_S = 30.0
"""After so long without one a process is stopped or its node is gone."""

_STOP = "rollverify/stop"


class Pulse:
    """The signs of life of this rank, and what the others gave; nothing at all for one rank."""

    def __init__(self, phase: Callable[[], str], stop: StopRequest) -> None:
        """Start the thread. `phase`: in words, such as "rollout of step 3"."""
        self._phase, self._stop, self._world = phase, stop, Ranks.world()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        if self._world.size > 1:
            # A client of its own: the ranks' may wait in it for long.
            store: Any = dist.distributed_c10d._get_default_store()
            self._store = store.clone()
            self._thread = threading.Thread(target=self._beat_on, name="pulse", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join(EVERY_S)

    def explained(self, error: BaseException) -> BaseException:
        """The error, or after a time-out a SilentRankError that names who was waited for."""
        if self._thread is None or "timed out" not in str(error).lower():
            return error
        try:
            self._beat()
            beats = [json.loads(self._store.get(_key(r))) for r in range(self._world.size)]
        except Exception as lost:
            logger.warning("the ranks' store does not answer: %s", lost)
            return error
        entered, phases, times = zip(*beats, strict=True)
        behind = [rank for rank, number in enumerate(entered) if number < max(entered)]
        if not behind:
            return error
        now = time.time()
        told = [
            f"rank {rank} is in {phases[rank]}"
            + f" and has given no sign of life for {now - times[rank]:.0f} s"
            * (now - times[rank] > NO_SIGN_S)
            for rank in behind
        ]
        found = SilentRankError(
            f"the others have waited too long (parallelism.timeout_s) for {len(behind)} of "
            f"{self._world.size} ranks: {'; '.join(told[:8])}"
        )
        found.__cause__ = error
        return found

    def _beat_on(self) -> None:
        while not self._is_closed.wait(EVERY_S):
            try:
                self._beat()
            except Exception:  # The store goes with the rank, or launcher, that holds it.
                return

    def _beat(self) -> None:
        what = [Ranks.num_entered, self._phase(), time.time()]
        self._store.set(_key(self._world.rank), json.dumps(what))
        if self._stop.signal_number is not None:
            self._store.set(_STOP, str(self._stop.signal_number))
        elif self._store.check([_STOP]):
            self._stop.take(int(self._store.get(_STOP)), of_others=True)


def _key(rank: int) -> str:
    return f"rollverify/pulse/{rank}"
