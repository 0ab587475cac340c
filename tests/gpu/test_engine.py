"""The engine on a GPU beside the trainer: device, transfers, pauses, sleep, log-probs, experts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.bfloat16_pair import NOISE, bfloat16_pair
from support.engine_pair import MAX_MODEL_LEN, Pair, generate, request
from support.moe_models import VOCAB_SIZE, moe_folder
from support.tiny_models import packed_row, random_documents, take_steps, tiny_folder

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]

PROMPTS = random_documents([3, 17, 60, 200], seed=3)


@pytest.fixture(scope="module", params=["off", "on"])
def pair(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, device: torch.device
) -> Iterator[Pair]:
    """Without and with CUDA graphs; on a CPU only without, where it would compile for minutes."""
    if request.param == "on" and device.type == "cpu":
        pytest.skip("CUDA graphs are for GPUs")
    root = tmp_path_factory.mktemp(f"compile_{request.param}")
    folder = tiny_folder(root / "model", max_position_embeddings=MAX_MODEL_LEN)
    made = bfloat16_pair(folder, root / "run", compile=request.param)
    made.sync.push(0)
    yield made
    made.engine.close()


def test_the_engine_is_on_the_trainers_device(pair: Pair, device: torch.device) -> None:
    places = {parameter.device for parameter in pair.engine._model().parameters()}
    assert {place.type for place in places} == {device.type}
    if device.type == "cuda":
        assert places == {pair.trainer.device}
        assert torch.cuda.current_device() == pair.trainer.device.index


def test_each_transfer_is_exact_and_changes_what_is_computed(pair: Pair) -> None:
    """The sums of bits are checked in `push`; graphs must read the new weights too."""
    before = pair.engine.score(PROMPTS[2])
    take_steps(pair.trainer, 3, seed=1)
    pair.sync.push(1)
    after = pair.engine.score(PROMPTS[2])
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > NOISE
    gaps = [abs(a - b) for a, b in zip(after, pair.trainer_score(PROMPTS[2]), strict=True)]
    assert max(gaps) <= NOISE
    pair.sync.push(1)
    assert pair.engine.score(PROMPTS[2]) == after


def test_sampled_logprobs_are_the_trainers_within_the_noise(pair: Pair) -> None:
    done = generate(pair.engine, [request(f"r{i}", ids) for i, ids in enumerate(PROMPTS)])
    for index, ids in enumerate(PROMPTS):
        one = done[f"r{index}"]
        trainer = pair.trainer_score([*ids, *one.token_ids])[len(ids) - 1 :]
        gaps = [abs(a - b) for a, b in zip(trainer, one.logprobs, strict=True)]
        assert max(gaps) <= NOISE


@pytest.mark.parametrize("num_steps", [1, 7])
def test_a_pause_loses_what_is_under_way_and_nothing_else(pair: Pair, num_steps: int) -> None:
    """Tokens so far are those of a run that was not paused; asynchronous steps may add one more."""
    wanted = [request(f"r{i}", ids, max_tokens=40) for i, ids in enumerate(PROMPTS)]
    whole = generate(pair.engine, wanted)
    for one in wanted:
        pair.engine.add_request(one)
    done = [one for _ in range(num_steps) for one in pair.engine.step()]
    paused = {one.request_id: one for one in pair.engine.pause()} | {
        one.request_id: one for one in done
    }
    assert pair.engine.num_unfinished == 0
    assert 0 <= pair.engine.num_lost_tokens <= 2 * len(wanted)
    for name, one in paused.items():
        assert one.token_ids == whole[name].token_ids[: len(one.token_ids)]
    pair.engine.reset_prefix_cache()  # Raises if a request still holds blocks.


def test_sleep_frees_the_memory_and_the_next_transfer_brings_the_weights(
    pair: Pair, device: torch.device
) -> None:
    before = pair.engine.score(PROMPTS[1])
    if device.type == "cuda":
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
    pair.engine.sleep()
    if device.type == "cuda":
        share = torch.cuda.mem_get_info()[1] * 0.2  # gpu_memory_utilization of the tests
        assert torch.cuda.mem_get_info()[0] - free > 0.5 * share
    take_steps(pair.trainer, 1, seed=5)  # The trainer works while it sleeps.
    pair.sync.push(7)
    after = pair.engine.score(PROMPTS[1])
    gaps = [abs(a - b) for a, b in zip(after, pair.trainer_score(PROMPTS[1]), strict=True)]
    assert max(gaps) <= NOISE and after != before


def test_experts_arrive_and_their_rows_are_counted(tmp_path: Path) -> None:
    folder = moe_folder(tmp_path / "model")
    pair = bfloat16_pair(folder, tmp_path / "run", record_routing=True)
    pair.sync.push(0)
    prompt = [token % VOCAB_SIZE for token in PROMPTS[1]]
    pair.trainer.forward_backward([packed_row([prompt])], lambda _, logprobs, __: -logprobs.mean())
    pair.trainer.optimizer_step()
    pair.sync.push(1)
    done = generate(pair.engine, [request("r", prompt)])["r"]
    fed = len(prompt) + len(done.token_ids) - 1
    assert done.routed_experts is not None and len(done.routed_experts) == fed
    pair.engine.close()
