"""The engine leaves threads and rank variables of its process as they were."""

import os
from contextlib import AbstractContextManager

import pytest
import torch

from rollverify.engine.vllm_cpu import StepThreads, cpu_threads, hidden_rank_variables, step_threads


@pytest.mark.parametrize(
    ("num_parameters", "num_tokens", "expected"),
    [
        (100_000, 239, 1),  # 239 * 0.5M = 119.5M
        (100_000, 240, 0),
        (800_000, 99, 1),  # 99 * 1.2M = 118.8M
        (800_000, 100, 0),
        (135_000_000, 1, 0),
    ],
)
def test_a_small_step_has_one_thread_and_a_larger_one_torchs(
    num_parameters: int, num_tokens: int, expected: int
) -> None:
    assert step_threads(0, num_parameters, num_tokens) == expected


def test_requested_threads_win_over_the_size() -> None:
    assert step_threads(2, 10, 1) == 2


def threads_in(context: AbstractContextManager[None]) -> int:
    with context:
        return torch.get_num_threads()


def test_the_tokens_of_new_prompts_count_in_the_next_step_only() -> None:
    many = torch.get_num_threads()
    threads = StepThreads(0, 100_000, on_cpu=True)
    threads.add(200)
    threads.add(30)
    assert threads_in(threads.of_step(10)) == many  # 240 tokens
    assert threads_in(threads.of_step(10)) == 1


def test_without_a_cpu_engine_threads_are_left_alone() -> None:
    many = torch.get_num_threads()
    assert threads_in(StepThreads(many + 1, 10, on_cpu=False).of_step(1)) == many


def test_threads_change_though_torchs_function_was_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's CPU worker does so; a call of it would change nothing."""
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    many = torch.get_num_threads()
    assert threads_in(cpu_threads(many + 1)) == many + 1
    assert torch.get_num_threads() == many


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
