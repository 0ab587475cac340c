"""Workers that hang, die or talk nonsense cost one request and never the run."""

import threading
import time

import pytest

from rollverify.errors import ConfigError
from rollverify.rewards import worker_pool
from rollverify.rewards.worker_pool import WorkerPool


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setattr(worker_pool, "GRACE_S", 0.1)
    pool = WorkerPool("tests.support.grading_worker", num_workers=2, time_out_s=1.5)
    yield pool
    pool.close()


def verdict(pool, answer):
    return pool.ask({"gold": "", "answer": answer})["verdict"]


def test_nothing_starts_before_it_is_needed(pool):
    assert pool.process_ids == []


def test_one_caller_needs_one_worker(pool):
    assert [verdict(pool, "a"), verdict(pool, "b")] == ["a", "b"]
    assert len(pool.process_ids) == 1


def test_replies_keep_the_order_of_many_requests(pool):
    replies = pool.ask_all([{"gold": "", "answer": str(i)} for i in range(40)])
    assert [reply["verdict"] for reply in replies] == [str(i) for i in range(40)]


def test_a_worker_that_hangs_costs_its_time_limit_and_is_replaced(pool):
    verdict(pool, "warm")
    (old,) = pool.process_ids
    start = time.monotonic()
    assert verdict(pool, "hang") == "timeout"
    assert 1.5 <= time.monotonic() - start < 4  # 1.5 s limit + 0.1 s grace, on a busy machine
    assert verdict(pool, "next") == "next" and old not in pool.process_ids


@pytest.mark.parametrize("answer", ["die", "noise"])
def test_a_worker_that_ends_or_talks_nonsense_is_an_error_after_a_second_try(pool, answer):
    assert verdict(pool, answer) == "error"
    assert verdict(pool, "next") == "next"


def test_a_worker_killed_between_requests_is_replaced_unseen(pool):
    verdict(pool, "first")
    (worker,) = pool._started
    worker.process.kill()
    worker.process.wait()
    assert verdict(pool, "second") == "second"


def test_a_reply_to_another_request_is_not_taken(pool):
    assert verdict(pool, "late reply of another") == "late reply of another"


def test_callers_in_several_threads_get_their_own_replies(pool):
    seen = {}
    threads = [
        threading.Thread(target=lambda n=n: seen.update({n: verdict(pool, n)})) for n in "abcdef"
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert seen == {n: n for n in "abcdef"}


def test_close_ends_every_worker(pool):
    verdict(pool, "a")
    (worker,) = pool._started
    pool.close()
    assert worker.process.poll() is not None and pool.process_ids == []


def test_a_module_that_is_missing_is_an_error_with_a_cure():
    pool = WorkerPool("tests.no_such_worker", num_workers=1, time_out_s=1.0)
    with pytest.raises(ConfigError, match=r"worker of data.reward ended with code 1 .* install"):
        verdict(pool, "a")
    assert pool.process_ids == []
