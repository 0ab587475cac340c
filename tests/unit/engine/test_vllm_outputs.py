"""What vLLM's outputs become: rows of routing, one per token fed."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollverify.engine.vllm_outputs import finished_completion, paused_completion
from rollverify.errors import RolloutError

PROMPT = [5, 6, 7]
RESPONSE = [11, 12, 13, 14]


def step_rows(first: int, number: int, dtype: Any = np.uint8) -> Any:
    """Rows [number, 2 layers, 2 experts] of one engine step; row j holds j + 1 everywhere."""
    values = np.arange(first + 1, first + number + 1, dtype=dtype)
    return np.broadcast_to(values[:, None, None], (number, 2, 2)).copy()


def chunks(number: int = 4, dtype: Any = np.uint8) -> list[Any]:
    """As vLLM collects them: the prompt's rows with the first token, then one row with each."""
    return [step_rows(0, 3, dtype)] + [step_rows(3 + i, 1, dtype) for i in range(number - 1)]


def state(collected: list[Any], response: list[int] = RESPONSE) -> Any:
    """A request in flight, greedy."""
    return SimpleNamespace(
        external_req_id="r",
        detokenizer=SimpleNamespace(output_token_ids=response),
        logprobs_processor=SimpleNamespace(logprobs=None),
        prompt_len=len(PROMPT),
        routed_experts_chunks=collected,
    )


def output(rows: Any) -> Any:
    """A finished request, greedy."""
    result = SimpleNamespace(
        token_ids=RESPONSE, logprobs=None, finish_reason="stop", routed_experts=rows
    )
    return SimpleNamespace(request_id="r", outputs=[result], prompt_token_ids=PROMPT)


def test_every_token_but_the_last_has_a_row() -> None:
    """RR01: P = 3 and R = 4 make 3 + 4 - 1 = 6 rows, in the order of the tokens."""
    paused = paused_completion(state(chunks()), has_routing=True).routed_experts
    finished = finished_completion(output(np.concatenate(chunks())), has_routing=True)
    for rows in (paused, finished.routed_experts):
        assert rows is not None and rows.dtype == torch.uint8 and rows.shape == (6, 2, 2)
        assert rows[:, 0, 0].tolist() == rows[:, 1, 1].tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("number", [3, 5])
def test_another_number_of_rows_is_an_error(number: int) -> None:
    """RR01: 5 or 7 rows for 3 + 4 tokens, and none at all."""
    message = (
        rf"request 'r': {2 + number} rows of routing for 3 tokens of context and 4 generated, "
        "expected 6"
    )
    with pytest.raises(RolloutError, match=message):
        paused_completion(state(chunks(number)), has_routing=True)
    with pytest.raises(RolloutError, match=message):
        finished_completion(output(np.concatenate(chunks(number))), has_routing=True)


def test_an_engine_that_records_and_returns_no_rows_is_an_error() -> None:
    with pytest.raises(RolloutError, match="request 'r': 0 rows of routing"):
        finished_completion(output(None), has_routing=True)


def test_nothing_generated_has_no_rows() -> None:
    assert paused_completion(state([], response=[]), has_routing=True).routed_experts is None


def test_an_engine_that_does_not_record_has_no_rows() -> None:
    assert paused_completion(state(chunks())).routed_experts is None
    assert finished_completion(output(np.concatenate(chunks()))).routed_experts is None


def test_ids_above_256_are_kept() -> None:
    """RR09: 300 stays 300; as uint8 it would be 300 - 256 = 44."""
    wide = [chunk + np.uint16(299) for chunk in chunks(dtype=np.uint16)]
    rows = paused_completion(state(wide), has_routing=True).routed_experts
    assert rows is not None and rows.dtype == torch.int16
    assert rows[:, 0, 0].tolist() == [300, 301, 302, 303, 304, 305]


def test_ids_beyond_int16_are_an_error() -> None:
    wide = [chunk + np.uint16(32767) for chunk in chunks(dtype=np.uint16)]
    with pytest.raises(RolloutError, match="an expert id above 32767 does not fit int16"):
        paused_completion(state(wide), has_routing=True)


def test_rows_do_not_keep_the_steps_arrays_alive() -> None:
    """A chunk is a view of a whole step: 1 of 1000 rows here. 6 rows of 2 * 2 bytes are 24."""
    big = np.zeros((1000, 2, 2), dtype=np.uint8)
    views = [big[:3], big[3:4], big[4:5], big[5:6]]
    rows = paused_completion(state(views), has_routing=True).routed_experts
    assert rows is not None and rows.untyped_storage().nbytes() == 24
    alone = paused_completion(state([big[:3]], RESPONSE[:1]), has_routing=True).routed_experts
    big[:] = 9
    assert alone is not None and alone.untyped_storage().nbytes() == 12
    assert rows.sum() == 0 and alone.sum() == 0
