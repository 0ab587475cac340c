"""The engine on a GPU beside the trainer: device, transfers, pauses, sleep, log-probs, experts."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.bfloat16_pair import NOISE, bfloat16_pair
from support.engine_pair import MAX_MODEL_LEN, Pair, generate, request
from support.tiny_models import random_documents, take_steps, tiny_folder

from rollverify.engine.engine import Completion, GenerationRequest

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]

PROMPTS = random_documents([3, 17, 60, 200], seed=3)
ENGINES: dict[str, dict[str, Any]] = {
    "graphs": {"compile": "on", "sleep": True},  # as by default on a GPU
    "eager": {"compile": "off"},
    # Refused in a run's config; here it shows what asynchronous steps change: the lost tokens.
    "no_async": {"compile": "off", "options": {"async_scheduling": False}},
}


@pytest.fixture(scope="module", params=list(ENGINES))
def pair(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, device: torch.device
) -> Iterator[Pair]:
    """One kind of engine after the other."""
    if request.param == "graphs" and device.type == "cpu":
        pytest.skip("CUDA graphs are for GPUs; on a CPU it would compile for minutes")
    root = tmp_path_factory.mktemp(request.param)
    folder = tiny_folder(root / "model", max_position_embeddings=MAX_MODEL_LEN)
    with bfloat16_pair(folder, root / "run", **ENGINES[request.param]) as made:
        yield made


def is_asynchronous(pair: Pair) -> bool:
    return bool(pair.engine._engine.vllm_config.scheduler_config.async_scheduling)


def gap_to_trainer(pair: Pair, ids: list[int]) -> float:
    """Largest |engine - trainer| log-prob of ids 1.., nats."""
    both = zip(pair.engine.score(ids), pair.trainer_score(ids), strict=True)
    return max(abs(a - b) for a, b in both)


def whole_responses(
    pair: Pair, wanted: list[GenerationRequest]
) -> dict[str, tuple[list[int], list[float]]]:
    """Tokens and log-probs. The prefix cache is emptied: with it, other kernels read a prompt."""
    pair.engine.reset_prefix_cache()
    done = generate(pair.engine, wanted)
    return {name: (one.token_ids, one.logprobs) for name, one in done.items()}


def run_and_pause(
    pair: Pair, wanted: list[GenerationRequest], num_steps: int
) -> dict[str, Completion]:
    """What was finished or paused after some engine steps."""
    pair.engine.reset_prefix_cache()
    for one in wanted:
        pair.engine.add_request(one)
    done = [one for _ in range(num_steps) for one in pair.engine.step()]
    return {one.request_id: one for one in [*done, *pair.engine.pause()]}


def requests() -> list[GenerationRequest]:
    return [request(f"r{i}", ids, max_tokens=40) for i, ids in enumerate(PROMPTS)]


def test_the_engine_is_on_the_trainers_device(pair: Pair, device: torch.device) -> None:
    places = {parameter.device for parameter in pair.engine._model().parameters()}
    assert {place.type for place in places} == {device.type}
    if device.type == "cuda":
        assert {place.index for place in places} == {torch.cuda.current_device()}
        assert torch.cuda.current_device() == (pair.trainer.device.index or 0)


def test_each_transfer_is_exact_and_changes_what_is_computed(pair: Pair) -> None:
    """The sums of bits are checked in `push`; graphs must read the new weights too."""
    before = pair.engine.score(PROMPTS[2])
    for version in (1, 2):
        take_steps(pair.trainer, 3, seed=version)
        pair.sync.push(version)
        after = pair.engine.score(PROMPTS[2])
        assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > NOISE
        assert gap_to_trainer(pair, PROMPTS[2]) <= NOISE
        before = after
    pair.sync.push(2)
    assert pair.engine.score(PROMPTS[2]) == before


def test_sampled_logprobs_are_the_trainers_within_the_noise(pair: Pair) -> None:
    done = whole_responses(pair, requests())
    for index, ids in enumerate(PROMPTS):
        tokens, logprobs = done[f"r{index}"]
        trainer = pair.trainer_score([*ids, *tokens])[len(ids) - 1 :]
        assert max(abs(a - b) for a, b in zip(trainer, logprobs, strict=True)) <= NOISE


@pytest.mark.parametrize("num_steps", [0, 1, 7])
def test_a_pause_gives_the_start_of_the_whole_response(pair: Pair, num_steps: int) -> None:
    whole = whole_responses(pair, requests())
    paused = run_and_pause(pair, requests(), num_steps)
    assert paused.keys() == whole.keys()
    for name, one in paused.items():
        tokens, logprobs = whole[name]
        number = len(one.token_ids)
        assert number <= num_steps or one.finish_reason != "paused"
        assert (one.token_ids, one.logprobs) == (tokens[:number], logprobs[:number])


def test_after_a_pause_nothing_is_left_and_what_was_under_way_is_counted(pair: Pair) -> None:
    paused = run_and_pause(pair, requests(), 5)
    lost = pair.engine.num_lost_tokens
    # A step ahead, one token a response: not measured. In step with us nothing is under way.
    assert 0 < lost <= 2 * len(paused) if is_asynchronous(pair) else lost == 0
    assert pair.engine.num_unfinished == 0 and pair.engine.step() == []
    assert pair.engine._scheduler.requests == {}
    pair.engine.reset_prefix_cache()  # Raises if a request still holds blocks.


def test_a_resumed_response_goes_on_with_its_own_context(pair: Pair) -> None:
    """Resumed with what it has, again and again: the same tokens, with the trainer's log-probs."""
    paused = run_and_pause(pair, requests(), 9)
    contexts = {
        name: [*PROMPTS[int(name[1:])], *one.token_ids]
        for name, one in paused.items()
        if one.finish_reason == "paused"
    }
    resumed = [request(name, ids, max_tokens=20) for name, ids in contexts.items()]
    done = whole_responses(pair, resumed)
    assert done and done == whole_responses(pair, resumed)
    for name, (tokens, logprobs) in done.items():
        trainer = pair.trainer_score([*contexts[name], *tokens])[len(contexts[name]) - 1 :]
        assert max(abs(a - b) for a, b in zip(trainer, logprobs, strict=True)) <= NOISE


def test_sleep_frees_the_memory_and_the_next_transfer_brings_the_weights(
    pair: Pair, device: torch.device
) -> None:
    is_on_gpu = device.type == "cuda"
    if is_on_gpu and not pair.engine._sleeps:
        pytest.skip("of the engines of a process one may sleep, which is the one with graphs")
    before = pair.engine.score(PROMPTS[1])
    free = torch.cuda.mem_get_info()[0] if is_on_gpu else 0
    pair.engine.sleep()
    if is_on_gpu:
        # Weights and cache are nearly all of its share; half of it shows that the cache is gone.
        freed, total = torch.cuda.mem_get_info()[0] - free, torch.cuda.mem_get_info()[1]
        assert freed > 0.5 * pair.engine._engine.vllm_config.cache_config.gpu_memory_utilization * (
            total
        )
    take_steps(pair.trainer, 1, seed=5)  # The trainer works while it sleeps.
    pair.sync.push(7)
    assert gap_to_trainer(pair, PROMPTS[1]) <= NOISE and pair.engine.score(PROMPTS[1]) != before
