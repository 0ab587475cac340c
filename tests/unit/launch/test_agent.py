"""What the launcher is told about ranks that could not report themselves."""

import signal

import pytest

from rollverify.launch.agent import killed_rank_error


@pytest.mark.parametrize("exitcode", [0, 1, 2, -signal.SIGTERM, -signal.SIGINT])
def test_rank_that_ended_itself_or_was_asked_to_has_no_report(exitcode: int) -> None:
    assert killed_rank_error(1, exitcode, 50.0) is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_crash_comes_before_every_other_cause(number: signal.Signals) -> None:
    report = killed_rank_error(1, -number, 50.0)
    assert report is not None
    assert (report.rank, report.time, report.kind) == (1, 0.0, "internal")
    assert number.name in report.message


def test_only_sigkill_mentions_memory() -> None:
    messages = [killed_rank_error(0, -n, 1.0) for n in (signal.SIGKILL, signal.SIGSEGV)]
    assert ["memory" in report.message for report in messages if report] == [True, False]


def test_abort_keeps_its_time_because_a_peer_may_have_caused_it() -> None:
    report = killed_rank_error(1, -signal.SIGABRT, 50.0)
    assert report is not None and report.time == 50.0
