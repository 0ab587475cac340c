"""The engine leaves threads and rank variables of its process as they were."""

import os

import pytest
import torch

from rollverify.rollout.host_process import cpu_threads, decode_threads, hidden_rank_variables


def test_small_model_decodes_with_one_thread_and_a_larger_one_with_torchs() -> None:
    assert decode_threads(0, 999_999) == 1
    assert decode_threads(0, 1_000_000) == 0


def test_requested_threads_win_over_the_size() -> None:
    assert decode_threads(2, 10) == 2


def test_threads_are_restored_after_an_error() -> None:
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="stop"), cpu_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise RuntimeError("stop")
    assert torch.get_num_threads() == before


def test_zero_threads_changes_nothing() -> None:
    before = torch.get_num_threads()
    with cpu_threads(0):
        assert torch.get_num_threads() == before


def test_rank_variables_are_hidden_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with hidden_rank_variables():
        assert "RANK" not in os.environ
    assert os.environ["RANK"] == "3"
