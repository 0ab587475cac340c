"""Pausing a real engine at any step and going on: tokens, log-probs, leftovers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_pair import (
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    PARITY_TOLERANCE,
    generate,
    request,
    tiny_engine,
)
from support.tiny_models import EOS_ID, Reference, random_documents, tiny_folder

from rollverify.engine.engine import Completion, GenerationRequest
from rollverify.errors import RolloutError

pytestmark = pytest.mark.vllm

PROMPTS = random_documents([3, 6, 11, 40], seed=5)
LIMIT = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(
        tmp_path_factory.mktemp("pause") / "model",
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.1,
    )


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Any]:
    made = tiny_engine(folder)
    yield made
    made.close()


def requests(number: int) -> list[GenerationRequest]:
    """More than the engine has slots, so that some wait."""
    return [request(f"r{i}", PROMPTS[i % 4], max_tokens=LIMIT, seed=i) for i in range(number)]


def run_and_pause(
    engine: Any, wanted: list[GenerationRequest], num_steps: int
) -> tuple[dict[str, Completion], dict[str, Completion]]:
    """(finished, paused) after some engine steps."""
    for one in wanted:
        engine.add_request(one)
    finished = {done.request_id: done for _ in range(num_steps) for done in engine.step()}
    paused = {done.request_id: done for done in engine.pause()}
    return finished, paused


@pytest.mark.parametrize("num_steps", [0, 1, 2, 7, 29, 30])
def test_a_pause_at_any_step_returns_exactly_what_was_generated(
    engine: Any, num_steps: int
) -> None:
    """PR11, PR13, PR15: a prefix of the uninterrupted response, empty before the first token."""
    wanted = requests(MAX_NUM_SEQS + 4)
    whole = generate(engine, wanted)
    finished, paused = run_and_pause(engine, wanted, num_steps)
    assert finished.keys() | paused.keys() == whole.keys() and not finished.keys() & paused.keys()
    for name, part in paused.items():
        assert part.finish_reason == "paused" and len(part.token_ids) <= num_steps
        assert len(part.logprobs) == len(part.token_ids)
        assert EOS_ID not in part.token_ids
        assert part.token_ids == whole[name].token_ids[: len(part.token_ids)]
        gaps = [abs(a - b) for a, b in zip(part.logprobs, whole[name].logprobs, strict=False)]
        assert max(gaps, default=0.0) <= PARITY_TOLERANCE
    waiting = [name for name, part in paused.items() if not part.token_ids]
    assert len(waiting) >= (len(wanted) if num_steps == 0 else 0)
    for name, done in finished.items():
        assert done.token_ids == whole[name].token_ids


def test_nothing_is_left_in_the_engine_after_a_pause(engine: Any) -> None:
    run_and_pause(engine, requests(8), 5)
    worker = engine._engine.model_executor.driver_worker.worker
    assert worker.model_runner.input_batch.num_reqs == 0  # Not left to the next step.
    assert engine.num_unfinished == 0 and engine.step() == [] and engine.pause() == []
    engine.reset_prefix_cache()  # Refused by vLLM while requests hold blocks.


def test_a_paused_response_goes_on_with_its_own_context(engine: Any, folder: Path) -> None:
    """Resumed with the tokens so far, its log-probs are those of the whole sequence."""
    _, paused = run_and_pause(engine, requests(4), 9)
    resumed = [
        request(
            name,
            [*PROMPTS[int(name[1:]) % 4], *part.token_ids],
            max_tokens=LIMIT - len(part.token_ids),
            seed=77,
        )
        for name, part in paused.items()
    ]
    reference = Reference(folder)
    for one, done in zip(resumed, generate(engine, resumed).values(), strict=True):
        assert len(done.token_ids) <= one.max_tokens
        want = reference.logprobs([*one.token_ids, *done.token_ids])[-len(done.token_ids) :]
        got = torch.tensor(done.logprobs, dtype=torch.float64)
        torch.testing.assert_close(got, want, atol=PARITY_TOLERANCE, rtol=0.0)


def test_pause_and_resume_can_be_repeated_exactly(engine: Any) -> None:
    def run() -> list[tuple[list[int], list[float]]]:
        _, paused = run_and_pause(engine, requests(8), 12)
        seen = [(part.token_ids, part.logprobs) for part in paused.values()]
        kept = {name: part.token_ids[:6] for name, part in paused.items()}
        wanted = [
            request(name, [*PROMPTS[0], *tokens], seed=5 + i)
            for i, (name, tokens) in enumerate(kept.items())
        ]
        return seen + [(d.token_ids, d.logprobs) for d in generate(engine, wanted).values()]

    assert run() == run()


def test_requests_that_the_engine_knows_under_other_names_are_an_error(engine: Any) -> None:
    """PR09: none of the requests is found, and that is not taken for a pause of none."""
    for one in requests(3):
        engine.add_request(one)
    states = engine._engine.output_processor.request_states
    names = {key: state.external_req_id for key, state in states.items()}
    for state in states.values():
        state.external_req_id += "-x7"
    try:
        with pytest.raises(RolloutError, match="0 of 3 requests were found for the pause"):
            engine.pause()
    finally:
        for key, state in states.items():
            state.external_req_id = names[key]
    assert len(engine.pause()) == 3
