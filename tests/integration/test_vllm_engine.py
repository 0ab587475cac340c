"""Sampling by a real engine: what a request says, and nothing else, decides the tokens."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
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
from support.tiny_models import EOS_ID, VOCAB_SIZE, Reference, random_documents, tiny_folder

from rollverify.engine.vllm_cpu import cpu_threads
from rollverify.engine.vllm_outputs import finished_completion
from rollverify.errors import ConfigError, RolloutError

pytestmark = pytest.mark.vllm

MISLEADING = {
    "temperature": 0.1,
    "top_k": 1,
    "top_p": 0.1,
    "repetition_penalty": 2.0,
    "eos_token_id": [token for token in range(VOCAB_SIZE) if token != EOS_ID],
}
PROMPTS = random_documents([2, 5, 9, 30, 150, 300], seed=11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose generation_config.json asks for something else than the requests."""
    path = tiny_folder(
        tmp_path_factory.mktemp("engine") / "model",
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.1,  # flatter than the default: many tokens are worth sampling
    )
    (path / "generation_config.json").write_text(json.dumps(MISLEADING))
    return path


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Any]:
    made = tiny_engine(folder)
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
def test_generation_config_changes_nothing(
    engine: Any, reference: Reference, temperature: float
) -> None:
    """The sampled tokens' log-probs are those of the whole vocabulary at the request's temperature.

    Under top_k 1 or top_p 0.1 they would be near 0; a repetition penalty would shift them; the
    file's stop tokens would end every response at once.
    """
    requests = [request(f"{i}", ids, temperature=temperature) for i, ids in enumerate(PROMPTS)]
    completions = generate(engine, requests)
    for one in requests:
        done = completions[one.request_id]
        assert len(done.token_ids) == one.max_tokens or done.token_ids[-1] == EOS_ID
        want = reference.logprobs([*one.token_ids, *done.token_ids], temperature)
        got = torch.tensor(done.logprobs, dtype=torch.float64)
        torch.testing.assert_close(got, want[-len(got) :], atol=PARITY_TOLERANCE, rtol=0.0)
    every = [value for done in completions.values() for value in done.logprobs]
    assert min(every) < -4.0 and len(set(every)) > len(PROMPTS)


def test_greedy_takes_the_likeliest_token(engine: Any, reference: Reference) -> None:
    ids = PROMPTS[2]
    done = generate(engine, [request("greedy", ids, temperature=0.0)])["greedy"]
    for _ in done.token_ids:
        logits = reference.model(input_ids=torch.tensor([ids])).logits[0, -1]
        ids = [*ids, int(logits.argmax())]
    assert ids[-len(done.token_ids) :] == done.token_ids
    assert done.logprobs == [0.0] * len(done.token_ids)


def test_seeds_decide_the_tokens_in_any_order_and_company(engine: Any) -> None:
    requests = [request(f"r{i}", PROMPTS[i % 4], max_tokens=30, seed=i) for i in range(24)]
    first = generate(engine, requests)
    backwards = generate(engine, requests[::-1])
    alone = {name: done for r in requests[:3] for name, done in generate(engine, [r]).items()}
    assert len(requests) > MAX_NUM_SEQS  # so some waited for others to end
    for name, done in first.items():
        assert backwards[name].token_ids == done.token_ids
        # Batches of other sizes sum in another order: float32 rounding only.
        assert backwards[name].logprobs == pytest.approx(done.logprobs, abs=PARITY_TOLERANCE)
        assert alone.get(name, done).token_ids == done.token_ids
    assert len({tuple(done.token_ids) for done in first.values()}) == len(requests)


def test_prompts_beyond_the_step_budget_wait_whole(engine: Any, reference: Reference) -> None:
    """Eight prompts of 300 tokens and a budget of 512 per step; seeded sampling survives it.

    vLLM on CPUs cannot rewind the generator of a request whose prompt is split over two steps.
    """
    requests = [request(f"long{i}", PROMPTS[5], seed=i) for i in range(8)]
    completions = generate(engine, requests)
    for one in requests:
        done = completions[one.request_id]
        want = reference.logprobs([*one.token_ids, *done.token_ids])[-len(done.logprobs) :]
        got = torch.tensor(done.logprobs, dtype=torch.float64)
        torch.testing.assert_close(got, want, atol=PARITY_TOLERANCE, rtol=0.0)


def test_stop_token_is_included_and_length_is_exact(engine: Any) -> None:
    requests = [request(f"s{i}", PROMPTS[1], max_tokens=100, seed=i) for i in range(32)]
    completions = list(generate(engine, requests).values())
    reasons = {done.finish_reason for done in completions}
    assert reasons == {"stop", "length"}  # with p(stop) near 1/101 both are certain to occur
    for done in completions:
        assert len(done.logprobs) == len(done.token_ids)
        if done.finish_reason == "stop":
            assert done.token_ids.index(EOS_ID) == len(done.token_ids) - 1
            assert done.logprobs[-1] < 0.0
        else:
            assert len(done.token_ids) == 100 and EOS_ID not in done.token_ids


def test_any_of_several_stop_tokens_ends_a_response(engine: Any, monkeypatch) -> None:
    """p of one of three is near 3/101 a token: of 32 responses most stop, at each of them."""
    stops = {EOS_ID, 7, 9}
    monkeypatch.setattr(engine, "_stop_token_ids", sorted(stops))
    requests = [request(f"s{i}", PROMPTS[1], max_tokens=100, seed=i) for i in range(32)]
    ended = [one for one in generate(engine, requests).values() if one.finish_reason == "stop"]
    assert {one.token_ids[-1] for one in ended} == stops
    assert all(not stops & set(one.token_ids[:-1]) for one in ended)


def output(sampled: int, entries: list[tuple[int, float]], reason: str = "stop") -> Any:
    """What vLLM hands over for one sampled token, with its alternatives in the order given."""
    from vllm.logprobs import FlatLogprobs, Logprob

    flat = FlatLogprobs()
    flat.append({token: Logprob(logprob=value) for token, value in entries})
    result = SimpleNamespace(token_ids=[sampled], logprobs=flat, finish_reason=reason)
    return SimpleNamespace(request_id="r", outputs=[result])


def test_logprob_is_that_of_the_sampled_token() -> None:
    """LP05: the likelier 512 must not be taken for 880; a missing 880 is an error."""
    done = finished_completion(output(880, [(880, -2.30), (512, -0.10)]))
    assert done.logprobs == pytest.approx([-2.30])
    for entries in ([(512, -0.10)], [(512, -0.10), (880, -2.30)]):
        with pytest.raises(RolloutError, match="log-probs of other tokens"):
            finished_completion(output(880, entries))


def test_unexpected_end_is_an_error() -> None:
    with pytest.raises(RolloutError, match="ended with reason 'abort' after 1 tokens"):
        finished_completion(output(5, [(5, -1.0)], reason="abort"))


def test_request_beyond_the_context_is_refused(engine: Any) -> None:
    too_long = request("long", PROMPTS[5], max_tokens=MAX_MODEL_LEN - 299)
    with pytest.raises(RolloutError, match="needs 513 tokens, the engine's context is 512"):
        engine.add_request(too_long)
    assert engine.num_unfinished == 0


def test_score_equals_transformers_and_leaves_no_request(engine: Any, reference: Reference) -> None:
    got = torch.tensor(engine.score(PROMPTS[4]), dtype=torch.float64)
    want = reference.logprobs(PROMPTS[4])
    torch.testing.assert_close(got, want, atol=PARITY_TOLERANCE, rtol=0.0)
    assert engine.num_unfinished == 0


def test_unsupported_head_size_is_a_config_error(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("the limit is that of the CPU attention kernels")
    bad = tiny_folder(tmp_path / "model", head_dim=16)
    with pytest.raises(
        ConfigError, match=r"has head_dim 16; on CPUs vLLM supports 32, 64"
    ) as caught:
        tiny_engine(bad)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [{"no_such_option": 1}, {"max_num_seqs": -1}])
def test_bad_engine_options_are_config_errors(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="vLLM refused the engine settings") as caught:
        tiny_engine(folder, options=options)
    assert "\n" not in str(caught.value)


def test_small_steps_run_on_one_thread_and_leave_the_others_to_the_trainer(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    step = engine._engine.step
    monkeypatch.setattr(
        engine._engine, "step", lambda: (seen.append(torch.get_num_threads()), step())[1]
    )
    with cpu_threads(2):
        generate(engine, [request("small", PROMPTS[0])])
        assert set(seen) == {1} and torch.get_num_threads() == 2


@pytest.mark.parametrize(("num_further", "ids"), [(0, [[1], [0]]), (1, [[1, 2], [0, 0]])])
def test_the_sampler_gives_the_log_prob_of_the_chosen_token_first(
    engine: Any, num_further: int, ids: list[list[int]]
) -> None:
    """The likeliest of the first row is 2, of the second 0; a started engine has the quick way."""
    sampler = engine._engine.model_executor.driver_worker.worker.model_runner.sampler
    logprobs = torch.tensor([[-3.0, -2.0, -0.2], [-0.1, -4.0, -5.0]])
    found = sampler.gather_logprobs(logprobs, num_further, torch.tensor([1, 0]))
    assert found.logprob_token_ids.tolist() == ids
    assert found.logprob_token_ids.dtype == torch.int32
    assert torch.equal(found.logprobs, logprobs.gather(1, torch.tensor(ids)))
    assert len(found.selected_token_ranks) == 2
