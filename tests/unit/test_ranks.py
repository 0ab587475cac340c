"""Reduction of metrics over ranks."""

import json

import pytest
from unit import reduce_worker

from rollverify.ranks import Ranks


def test_without_a_process_group_nothing_changes():
    sums, maxima = {"a": 1.0}, {"m": 2.0}
    assert Ranks.world().reduce(sums, maxima) == (sums, maxima)


@pytest.mark.distributed
def test_two_ranks_get_the_same_sums_and_maxima(run_gloo_workers):
    folder = run_gloo_workers(reduce_worker.main, 2)
    for rank in range(2):
        result = json.loads((folder / f"{rank}.json").read_text())
        reduced, only_maxima, only_sums, error, gathered, nothing = result
        assert reduced == [{"a": 3.0, "b": 30.0}, {"m": -4.0}]
        assert only_maxima == [{}, {"m": 1.0}]
        assert only_sums == [{"a": 1.0}, {}]
        assert "different metric keys" in error
        assert gathered == [[0.0, 1.0, 10.0], [11.0, 12.0, 13.0]]
        assert nothing == [[]]
