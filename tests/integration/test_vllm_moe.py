"""Routing out of a real engine, and expert weights into it, against transformers.

All tests share one engine, whose KV cache is so small that long responses are preempted.
"""

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
from support.moe_models import (
    DENSE_LAYER,
    NUM_LAYERS,
    TOP_K,
    MoeReference,
    folder_weights,
    moe_folder,
)
from support.tiny_models import tiny_folder

from rollverify.engine.engine import Completion, GenerationRequest
from rollverify.engine.vllm_cpu import _load_packed, load_experts_packed
from rollverify.engine.weight_sync import WeightSync
from rollverify.errors import ConfigError, WeightSyncError

pytestmark = pytest.mark.vllm
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="experts are packed on CPUs only")

KV_TOKENS = 1536
"""12 blocks of 128. Keys and values of a token: 2 * 3 layers * 1 head * 32 numbers of 4 bytes."""
KV_GIB = KV_TOKENS * 2 * NUM_LAYERS * 32 * 4 / 2**30


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random ids without the stop token."""
    generator = torch.Generator().manual_seed(100 * length + seed)
    return torch.randint(2, 64, (length,), generator=generator).tolist()


PROBE = prompt(60)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape; the engine starts with the first."""
    root = tmp_path_factory.mktemp("moe")
    return [moe_folder(root / str(seed), seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def references(folders: list[Path]) -> list[MoeReference]:
    return [MoeReference(folder) for folder in folders]


@pytest.fixture(scope="module")
def shared(folders: list[Path]) -> Iterator[Any]:
    made = tiny_engine(folders[0], record_routing=True, kv_cache_gib=KV_GIB)
    yield made
    made.close()


@pytest.fixture
def engine(shared: Any, folders: list[Path]) -> Any:
    """The engine with the first model's weights and nothing in its prefix cache."""
    load(shared, folders[0])
    return shared


def load(engine: Any, folder: Path) -> None:
    engine.load_weights(folder_weights(folder))
    engine.reset_prefix_cache()


def gap(engine: Any, reference: MoeReference) -> float:
    """Largest difference of the probe's log-probs, nats."""
    scores = torch.tensor(engine.score(PROBE), dtype=torch.float64)
    return (scores - reference.logprobs(PROBE)).abs().max().item()


def check_rows(one: GenerationRequest, done: Completion, reference: MoeReference) -> None:
    """Every token but the last has the experts that transformers chooses; dense layers have 0."""
    ids = [*one.token_ids, *done.token_ids]
    rows = done.routed_experts
    assert rows is not None and rows.dtype == torch.uint8
    assert rows.shape == (len(ids) - 1, NUM_LAYERS, TOP_K)
    assert rows[:, DENSE_LAYER].sum() == 0
    assert torch.equal(rows.long().sort(-1).values, reference.experts(ids))


def steps_and_pause(
    engine: Any, wanted: list[GenerationRequest], num_steps: int
) -> dict[str, Completion]:
    """Completions of all requests, finished or paused after some engine steps."""
    for one in wanted:
        engine.add_request(one)
    finished = [done for _ in range(num_steps) for done in engine.step()]
    return {done.request_id: done for done in [*finished, *engine.pause()]}


def mixed(number: int) -> list[GenerationRequest]:
    """Prompts of five lengths, up to 20 tokens each."""
    lengths = [1, 3, 9, 40, 140]
    return [request(f"m{i}", prompt(lengths[i % 5], i), max_tokens=20) for i in range(number)]


def test_rows_are_the_routers_choice(engine: Any, references: list[MoeReference]) -> None:
    """RR01: P + R - 1 rows at the stop token and at the limit alike."""
    wanted = mixed(32)
    done = generate(engine, wanted)
    for one in wanted:
        check_rows(one, done[one.request_id], references[0])
    assert {d.finish_reason for d in done.values()} == {"stop", "length"}


@pytest.mark.parametrize("num_steps", [0, 1, 2, 7])
def test_paused_rows_end_before_the_last_token(
    engine: Any, references: list[MoeReference], num_steps: int
) -> None:
    wanted = mixed(MAX_NUM_SEQS + 4)
    parts = steps_and_pause(engine, wanted, num_steps)
    for one in wanted:
        part = parts[one.request_id]
        if part.token_ids:
            check_rows(one, part, references[0])
        else:
            assert part.routed_experts is None
    empty = sum(not part.token_ids for part in parts.values())
    assert empty == len(wanted) if num_steps == 0 else 0 < empty < len(wanted)


def test_cached_prompts_have_their_rows(engine: Any, references: list[MoeReference]) -> None:
    """A group of 8: the 128 tokens of the prompt's full block are computed once."""
    wanted = [request(f"g{i}", prompt(140), max_tokens=30) for i in range(8)]
    for one in wanted:
        engine.add_request(one)
    engine.step()
    states = engine._engine.output_processor.request_states.values()
    assert sorted(state.num_cached_tokens for state in states)[-7:] == [128] * 7
    done = {d.request_id: d for _ in range(9) for d in engine.step()}
    done |= {d.request_id: d for d in engine.pause()}
    for one in wanted:
        check_rows(one, done[one.request_id], references[0])


def test_preempted_requests_have_their_rows(
    engine: Any, references: list[MoeReference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """6 of 8 prompts of 230 tokens fill the 12 blocks; at 256 each wants a third one."""
    scheduler = engine._engine.engine_core.engine_core.scheduler
    preempted: set[str] = set()
    preempt = scheduler._preempt_request

    def counted(victim: Any, *args: Any, **kwargs: Any) -> None:
        preempted.add(victim.request_id)
        preempt(victim, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", counted)
    wanted = [request(f"p{i}", prompt(230, i), max_tokens=40, seed=i) for i in range(8)]
    done = generate(engine, wanted)
    for one in wanted:
        check_rows(one, done[one.request_id], references[0])
    assert preempted


def test_resumed_rows_are_those_of_the_new_weights(
    engine: Any, references: list[MoeReference], folders: list[Path]
) -> None:
    """The whole context is routed again, its last token before the pause included (RR03)."""
    parts = steps_and_pause(engine, mixed(8), 6)
    load(engine, folders[1])
    resumed = [
        request(one.request_id, [*one.token_ids, *parts[one.request_id].token_ids], max_tokens=9)
        for one in mixed(8)
        if parts[one.request_id].finish_reason == "paused"
    ]
    done = generate(engine, resumed)
    changed = 0
    for one in resumed:
        check_rows(one, done[one.request_id], references[1])
        before = parts[one.request_id].routed_experts
        assert before is not None
        after = done[one.request_id].routed_experts[: len(before)]
        changed += int((before != after).any(-1).any(-1).sum())
    assert changed > 100  # of some 250 tokens: other weights route most tokens otherwise


def test_the_same_weights_twice_change_nothing(
    engine: Any, references: list[MoeReference], folders: list[Path]
) -> None:
    """WS05: the second load does not write over what the first one rearranged."""
    first = engine.score(PROBE)
    load(engine, folders[0])
    assert engine.score(PROBE) == first
    load(engine, folders[1])
    assert gap(engine, references[1]) <= PARITY_TOLERANCE < gap(engine, references[0])
    load(engine, folders[0])
    assert engine.score(PROBE) == first
    assert gap(engine, references[0]) <= PARITY_TOLERANCE


def make_sync(engine: Any, folder: Path, without: str = "") -> WeightSync:
    """The transfer of a folder's weights, some left out."""
    reference = MoeReference(folder)
    return WeightSync(
        engine=engine,
        parameters=lambda: ((n, t) for n, t in folder_weights(folder) if n != without),
        trainer_score=lambda ids: reference.logprobs(ids).tolist(),
        probe_ids=PROBE,
        parity_tolerance=PARITY_TOLERANCE,
    )


def test_weight_sync_holds_for_experts(engine: Any, folders: list[Path]) -> None:
    """Names and parity, transfer after transfer; no parameter of the engine is left unwritten."""
    for version, folder in enumerate([folders[1], folders[0], folders[0]]):
        make_sync(engine, folder).push(version)
    assert engine.load_weights(folder_weights(folders[0])) == engine.parameter_names()


def test_a_missing_expert_is_an_error(engine: Any, folders: list[Path]) -> None:
    without = "model.layers.2.mlp.experts.5.down_proj.weight"
    with pytest.raises(WeightSyncError, match=r"1 of \d+ engine parameters do not .*2\..*w2_w"):
        make_sync(engine, folders[0], without).push(0)


def test_an_expert_of_another_shape_is_an_error(engine: Any, folders: list[Path]) -> None:
    """vLLM's own loader takes a smaller expert without a word."""
    sync = make_sync(engine, folders[0])
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    sync.parameters = lambda: iter([(name, torch.zeros(32, 64))])
    with pytest.raises(WeightSyncError, match=r"expert 3, w3: got shape \[32, 64\], .* \[64, 64\]"):
        sync.push(0)


@on_cpu
def test_every_layer_with_experts_loads_packed(shared: Any) -> None:
    assert load_experts_packed(shared._model()) == NUM_LAYERS - 1


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 48])
def test_packing_one_projection_at_a_time_packs_the_layer(dtype: torch.dtype, size: int) -> None:
    """Experts of size 48 are padded with zeros to the kernel's next block, 64."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    w1, w3, w2 = torch.randn(3, 2, size, 96).to(dtype)
    w2 = w2.mT.contiguous()
    zeros = torch.zeros(2, 64 - size, 96, dtype=dtype)
    plain13 = torch.cat([w1, zeros, w3, zeros], dim=1)
    plain2 = torch.cat([w2, zeros.mT], dim=2)
    w13_weight, w2_weight = torch.full_like(plain13, 9.0), torch.full_like(plain2, 9.0)
    for expert in range(2):
        for weight, part, tensor in [(w1, "w1", w13_weight), (w3, "w3", w13_weight)]:
            _load_packed(tensor, weight[expert], "w13", part, expert, isa="vec", size=size)
        _load_packed(w2_weight, w2[expert], "w2", "w2", expert, isa="vec", size=size)
    assert torch.equal(w13_weight, cpu_prepack_moe_weight(plain13, "vec"))
    assert torch.equal(w2_weight, cpu_prepack_moe_weight(plain2.contiguous(), "vec"))


def test_routing_of_a_dense_model_is_a_config_error(tmp_path: Path) -> None:
    dense = tiny_folder(tmp_path / "dense", max_position_embeddings=MAX_MODEL_LEN)
    with pytest.raises(ConfigError, match="has no experts whose routing could be recorded"):
        tiny_engine(dense, record_routing=True)
