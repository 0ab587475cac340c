"""Weight transfer into a real engine, from weights that training steps changed.

The judge is transformers' own forward pass of the exported weights.
"""

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.engine_pair import PARITY_TOLERANCE, Pair, generate, request
from support.tiny_models import Reference, export, full_parameters, random_documents, take_steps
from torch import Tensor

from rollverify.engine.weight_sync import WeightSync
from rollverify.errors import RolloutError, StaleWeightsError, WeightSyncError

pytestmark = pytest.mark.vllm

# The longest is more than two of vLLM's 128-token blocks, so it can come from the prefix cache.
PROMPTS = random_documents([3, 17, 60, 300], seed=3)
PROBE = random_documents([50], seed=4)[0]


def reference_of(pair: Pair, tmp_path: Path) -> Reference:
    return Reference(export(pair.trainer, tmp_path / "exported", pair.folder))


def largest_gap(pair: Pair, reference: Reference, temperature: float) -> float:
    """Largest |engine - transformers| over the sampled tokens of all prompts, nats."""
    requests = [
        request(f"{i}/{j}", ids, temperature=temperature)
        for i, ids in enumerate(PROMPTS)
        for j in range(3)
    ]
    completions = generate(pair.engine, requests)
    gaps = []
    for one in requests:
        done = completions[one.request_id]
        want = reference.logprobs([*one.token_ids, *done.token_ids], temperature)
        got = torch.tensor(done.logprobs, dtype=torch.float64)
        gaps.append((got - want[-len(got) :]).abs().max().item())
    return max(gaps)


def test_behaviour_logprobs_equal_transformers_after_each_of_three_syncs(
    pair: Pair, tmp_path: Path
) -> None:
    """WS01, WS05, LP01: second and third transfer too, at temperature 1 and below."""
    pair.sync.push(0)
    old = reference_of(pair, tmp_path)
    for version in (1, 2, 3):
        take_steps(pair.trainer, 1, seed=version)
        pair.sync.push(version)
        assert pair.sync.policy_version == version
        assert pair.sync.parity_abs_max <= PARITY_TOLERANCE
        reference = reference_of(pair, tmp_path)
        for temperature in (1.0, 0.7):
            assert largest_gap(pair, reference, temperature) <= PARITY_TOLERANCE
    assert largest_gap(pair, old, 1.0) > 0.1  # the weights had really changed


class Weights:
    """A transfer from a dictionary, judged by transformers: a trainer that can be set back."""

    def __init__(self, pair: Pair) -> None:
        self.tensors = full_parameters(pair.trainer)
        self.model = Reference(pair.folder)
        self.sync = WeightSync(
            engine=pair.engine,
            parameters=lambda: iter(self.tensors.items()),
            trainer_score=lambda ids: self.model.logprobs(ids).tolist(),
            probe_ids=PROBE,
            parity_tolerance=PARITY_TOLERANCE,
        )

    def use(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.model.model.load_state_dict(tensors, strict=False)


def test_same_weights_again_change_nothing_and_a_b_a_is_a(pair: Pair) -> None:
    """WS05: bit for bit, as the same numbers go through the same kernels."""
    weights = Weights(pair)
    a = full_parameters(pair.trainer)
    take_steps(pair.trainer, 1, seed=50)
    b = full_parameters(pair.trainer)
    scores = []
    for tensors in (a, a, b, a):
        weights.use(tensors)
        weights.sync.push(0)
        scores.append(pair.engine.score(PROBE))
    assert scores[0] == scores[1] == scores[3]
    assert max(abs(x - y) for x, y in zip(scores[0], scores[2], strict=True)) > 0.1


def test_embedding_row_arrives_in_embedding_and_head(pair: Pair) -> None:
    """WS01, with 0.5 for 2.0: logits stay below 48 * 0.5 = 24, where float32 steps are 2e-6."""
    weight = pair.trainer.model.tok_embeddings.weight.to_local().detach()
    before = weight[0].clone()
    weight[0] = 0.5
    pair.sync.push(9)
    model = pair.engine._model()
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    tied = pair.trainer.config.model_spec.model.enable_weight_tying
    assert (embedding[0] == 0.5).all()
    assert torch.equal(embedding, head) == tied
    ids = [5, 0, 7, 0, 0, 9]
    gaps = [
        abs(x - y) for x, y in zip(pair.engine.score(ids), pair.trainer_score(ids), strict=True)
    ]
    assert max(gaps) <= PARITY_TOLERANCE
    weight[0] = before


def test_any_single_tensor_left_stale_is_caught(pair: Pair) -> None:
    weights = Weights(pair)
    old = full_parameters(pair.trainer)
    take_steps(pair.trainer, 2, seed=60)
    new = full_parameters(pair.trainer)
    weights.use(new)
    weights.sync.push(0)
    for name in new:
        assert not torch.equal(old[name], new[name]), name
        weights.tensors = {**new, name: old[name]}
        with pytest.raises(StaleWeightsError, match="after the transfer of policy 7"):
            weights.sync.push(7)
        assert weights.sync.policy_version is None
    weights.tensors = new
    weights.sync.push(8)  # recovers
    assert weights.sync.policy_version == 8


def test_one_flipped_bit_is_caught_in_any_parameter(pair: Pair, monkeypatch) -> None:
    """The last bit of one value, changed after it was loaded: no probe could tell."""
    weights, model = Weights(pair), pair.engine._model()
    load = type(model).load_weights
    weights.use(full_parameters(pair.trainer))
    for name, parameter in model.named_parameters():

        def load_and_flip(self, sent, parameter=parameter):
            written = load(self, sent)
            parameter.data.view(torch.int32).view(-1)[-1] ^= 1
            return written

        monkeypatch.setattr(type(model), "load_weights", load_and_flip)
        with pytest.raises(WeightSyncError, match=rf"1 of \d+ engine parameters .*{name}"):
            weights.sync.push(0)
    monkeypatch.setattr(type(model), "load_weights", load)
    weights.sync.push(1)


def test_an_engine_that_sleeps_takes_weights_and_requests_in_order(pair: Pair) -> None:
    """Only the order is kept on a CPU; what leaves the memory of a GPU is a test for one."""
    engine = pair.engine
    engine.add_request(request("r", [1, 2]))
    with pytest.raises(RolloutError, match="sent to sleep while 1 requests"):
        engine.sleep()
    engine.pause()
    engine.sleep()
    engine.sleep()
    with pytest.raises(RolloutError, match="kv_cache and weights are asleep"):
        engine.add_request(request("r", [1, 2]))
    with pytest.raises(RolloutError, match="weights are asleep"):
        engine.load_weights(iter([]))
    engine.wake("weights")
    with pytest.raises(RolloutError, match="engine's kv_cache are asleep"):
        engine.add_request(request("r", [1, 2]))
    pair.sync.push(0)
    assert len(generate(engine, [request("r", [1, 2])])["r"].token_ids) == 12


def test_missing_tensor_is_named(pair: Pair) -> None:
    complete = full_parameters(pair.trainer)
    lost = "model.layers.1.mlp.down_proj.weight"
    partial = {name: tensor for name, tensor in complete.items() if name != lost}
    first, later = Weights(pair), Weights(pair)
    first.use(partial)
    with pytest.raises(WeightSyncError, match=r"got no weight: model\.layers\.1\.mlp\.down_proj"):
        first.sync.push(0)
    later.use(complete)
    later.sync.push(0)
    later.use(partial)
    with pytest.raises(WeightSyncError, match=rf"changed between transfers: {lost}"):
        later.sync.push(1)


def test_unknown_name_and_wrong_shape_are_named(pair: Pair) -> None:
    """WS07."""
    weights = Weights(pair)
    complete = full_parameters(pair.trainer)
    weights.tensors = {**complete, "model.layers.0.mlp.extra.weight": torch.ones(2, 2)}
    with pytest.raises(WeightSyncError, match="extra"):
        weights.sync.push(0)
    weights.tensors = {**complete, "model.norm.weight": torch.ones(7)}
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight"):
        weights.sync.push(0)
    weights.use(complete)
    weights.sync.push(1)


def test_weights_are_refused_while_requests_run(pair: Pair) -> None:
    """WS09."""
    pair.sync.push(1)
    alone = generate(pair.engine, [request("busy", PROMPTS[1])])["busy"]
    pair.engine.add_request(request("busy", PROMPTS[1]))
    pair.engine.step()
    with pytest.raises(RolloutError, match="while 1 requests are running"):
        pair.sync.push(2)
    assert pair.sync.policy_version is None
    finished = []
    while pair.engine.num_unfinished:
        finished += pair.engine.step()
    assert finished[0].token_ids == alone.token_ids
    assert finished[0].logprobs == alone.logprobs  # same batch of one, same weights
    pair.sync.push(2)


def test_prefix_cache_would_be_stale_and_is_cleared(pair: Pair, tmp_path: Path) -> None:
    """Keys and values of a prompt's full blocks outlive the weights unless the sync clears them."""
    pair.sync.push(0)
    prompt = request("long", PROMPTS[3], max_tokens=4)
    generate(pair.engine, [prompt])
    take_steps(pair.trainer, 2, seed=70)
    reference = reference_of(pair, tmp_path)

    def gap() -> float:
        done = generate(pair.engine, [prompt])["long"]
        want = reference.logprobs([*prompt.token_ids, *done.token_ids])[-len(done.logprobs) :]
        return (torch.tensor(done.logprobs, dtype=torch.float64) - want).abs().max().item()

    pair.engine.load_weights(pair.trainer.hf_parameters())
    assert gap() > 1e-3  # far above rounding: the cache was used
    pair.sync.push(1)
    assert gap() <= PARITY_TOLERANCE


def test_never_two_full_tensors_are_alive(pair: Pair) -> None:
    """Peak extra memory is one parameter: an array lives as long as any alias of its memory."""
    arrays: list[weakref.ref] = []
    most_alive = 0

    def tracked() -> Iterator[tuple[str, Tensor]]:
        nonlocal most_alive
        for name, tensor in full_parameters(pair.trainer).items():
            array = tensor.numpy().copy()
            arrays.append(weakref.ref(array))
            full = torch.from_numpy(array)
            del array
            most_alive = max(most_alive, sum(ref() is not None for ref in arrays))
            yield name, full
            del full

    sync = WeightSync(
        engine=pair.engine,
        parameters=tracked,
        trainer_score=pair.trainer_score,
        probe_ids=PROBE,
        parity_tolerance=PARITY_TOLERANCE,
    )
    sync.push(3)
    assert (most_alive, sum(ref() is not None for ref in arrays)) == (1, 0)
    pair.sync.push(4)  # the trainer's own tensors were not emptied
