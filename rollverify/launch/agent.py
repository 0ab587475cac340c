"""torchrun, as the launcher starts it: quiet, and with a report for ranks that were killed."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from rollverify.launch.shutdown import (
    BEFORE_ALL,
    ERROR_DIR_VARIABLE,
    RankError,
    die_with_parent,
    read_rank_errors,
    save_rank_error,
)

_BY_AGENT = {signal.SIGTERM, signal.SIGINT}
_CRASHES = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}


def killed_rank_error(rank: int, exitcode: int, timestamp: float) -> RankError | None:
    """Report of a rank that a signal ended; None if it ended itself or torchrun ended it.

    A crash counts as the first cause: peers see the connection close, and may report it, earlier.
    """
    if exitcode >= 0 or -exitcode in _BY_AGENT:
        return None
    name = signal.Signals(-exitcode).name
    hint = "; the kernel does this when memory runs out" if -exitcode == signal.SIGKILL else ""
    return RankError(
        rank=rank,
        time=BEFORE_ALL if -exitcode in _CRASHES else timestamp,
        kind="internal",
        message=f"the process was ended by {name}{hint}",
        traceback="",
    )


def _report_at_once(folder: Path) -> None:
    """Write the reports as soon as torchrun finds that ranks have ended.

    It tells its caller only after it has ended the others, for which it waits up to 30 s; the
    launcher has less patience. What torchrun itself ends afterwards gets no report.
    """
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    from rollverify.launch.rendezvous import BoundRendezvous

    capture = SubprocessContext._capture_process_failures

    def capture_and_report(context: SubprocessContext, done_local_ranks: set[int]) -> None:
        is_first = not context._failures
        capture(context, done_local_ranks)
        for local_rank, failure in context._failures.items() if is_first else ():
            rank = int(context.envs[local_rank]["RANK"])
            report = killed_rank_error(rank, failure.exitcode, float(failure.timestamp))
            if report:
                save_rank_error(report, folder)
        relay = BoundRendezvous.relay
        if is_first and relay and read_rank_errors(folder):
            threading.Thread(target=relay.say_last_words, name="last-words", daemon=True).start()

    SubprocessContext._capture_process_failures = capture_and_report  # pyright: ignore[reportAttributeAccessIssue]


def main(argv: Sequence[str]) -> int:
    """Run torchrun with these arguments; exit code 0, 1, or 128 + signal.

    The signal may have reached another node: its ranks then end with that code.
    """
    die_with_parent()
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

    # Its warnings repeat, at length, what the ranks report themselves.
    logging.disable(logging.ERROR)
    from rollverify.launch.rendezvous import LAST_WORDS_S, BoundRendezvous

    static_tcp_rendezvous.StaticTCPRendezvous = BoundRendezvous
    folder = os.environ.get(ERROR_DIR_VARIABLE)
    if folder:
        BoundRendezvous.folder = Path(folder)
        BoundRendezvous.ranks_per_node = int(argv[argv.index("--nproc-per-node") + 1])
        _report_at_once(Path(folder))
    try:
        torchrun.main(list(argv))
    except SignalException as stop:
        return 128 + int(stop.sigval)
    except ChildFailedError as failed:
        if relay := BoundRendezvous.relay:
            relay.last_words_said.wait(LAST_WORDS_S)
        codes = {failure.exitcode for failure in failed.failures.values()}
        return max(codes) if codes <= {128 + number for number in _BY_AGENT} else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
