"""torchrun, as the launcher starts it: quiet, and with a report for ranks that were killed.

It adds no policy of its own: torchrun starts the ranks, hosts their store and ends them together.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rollverify.shutdown import ERROR_DIR_VARIABLE, RankError, die_with_parent, save_rank_error

_BEFORE_ALL = 0.0
_BY_AGENT = {signal.SIGTERM, signal.SIGINT}
_CRASHES = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


def killed_rank_error(rank: int, exitcode: int, timestamp: float) -> RankError | None:
    """Report of a rank that a signal ended; None if it ended itself or torchrun ended it.

    A crash counts as the first cause, although its peers, which only saw the connection close,
    may have reported before torchrun noticed it.
    """
    if exitcode >= 0 or -exitcode in _BY_AGENT:
        return None
    name = signal.Signals(-exitcode).name
    hint = "; the kernel does this when memory runs out" if -exitcode == signal.SIGKILL else ""
    return RankError(
        rank=rank,
        time=_BEFORE_ALL if -exitcode in _CRASHES else timestamp,
        kind="internal",
        message=f"the process was ended by {name}{hint}",
        traceback="",
    )


def main(argv: Sequence[str]) -> int:
    """Run torchrun with these arguments; exit code 0, 1, or 128 + signal."""
    die_with_parent()
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Its warnings repeat, at length, what the ranks report themselves.
    logging.disable(logging.ERROR)
    try:
        torchrun.main(list(argv))
    except SignalException as stop:
        return 128 + int(stop.sigval)
    except ChildFailedError as error:
        folder = os.environ.get(ERROR_DIR_VARIABLE)
        for rank, failure in error.failures.items():
            report = killed_rank_error(rank, failure.exitcode, float(failure.timestamp))
            if folder and report:
                save_rank_error(report, Path(folder))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
