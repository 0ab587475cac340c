"""Parts of a plan against sums done by hand, for a model of a few values."""

from typing import Any

import pytest

from rollverify.config.tables import Config, EngineConfig, TrainingConfig
from rollverify.dry_run.memory import (
    Layout,
    Parameter,
    Sizes,
    engine_bytes,
    engine_values,
    gathered_units,
    kept_values,
    kv_bytes_per_token,
    layer_values,
    owned,
    step_bytes,
)

SIZES = Sizes(
    num_layers=3,
    hidden_size=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=100,
    inner_size=16,
)
WEIGHTS = [
    Parameter(name="tok_embeddings.weight", shape=(100, 8)),
    Parameter(name="layers.0.attention.wo.weight", shape=(10, 6)),
    Parameter(name="layers.0.ffn_norm.weight", shape=(9,)),
    Parameter(name="layers.1.moe.routed_experts.inner_experts.w1_EFD", shape=(4, 6, 10)),
    Parameter(name="norm.weight", shape=(8,)),
]
HEAD = Parameter(name="lm_head.weight", shape=(100, 8))
ONE = Layout()


@pytest.mark.parametrize(
    ("parameter", "want"),
    [
        # 100 rows over 4 ranks: 25 rows of 8, halved by the tensor ranks.
        (WEIGHTS[0], 25 * 8 // 2),
        # 10 rows over 4 ranks: the first has 3, of 6 values, halved.
        (WEIGHTS[1], 9),
        # A norm is the same on all tensor ranks: 9 values over 4 ranks.
        (WEIGHTS[2], 3),
        # 240 values of experts over 4 * 2 ranks.
        (WEIGHTS[3], 30),
    ],
)
def test_fullest_rank_owns_its_rows_rounded_up(parameter: Parameter, want: int) -> None:
    assert owned(parameter, Layout(shard=4, tensor=2)) == want


def test_a_tied_embedding_is_gathered_with_the_head() -> None:
    assert gathered_units(WEIGHTS, ONE) == {"head": 808, "layer 0": 69, "layer 1": 240}
    apart = {"head": 808, "embedding": 800, "layer 0": 69, "layer 1": 240}
    assert gathered_units([*WEIGHTS, HEAD], ONE) == apart


def test_tensor_ranks_divide_matrices_and_expert_ranks_experts() -> None:
    halves = {"head": 408, "layer 0": 39, "layer 1": 120}
    assert gathered_units(WEIGHTS, Layout(shard=4, tensor=2)) == halves
    quarters = {"head": 808, "layer 0": 69, "layer 1": 60}
    assert gathered_units(WEIGHTS, Layout(shard=4, expert=4)) == quarters


@pytest.mark.parametrize(
    ("experts", "tensor", "want"),
    [
        # 4 * 8 + 3 * (4 + 2) * 4 + 4 * 16 kept; 8 + 2 * 16 in the backward pass
        (0, 1, (32 + 72 + 64, 40)),
        (0, 2, (32 + 36 + 32, 24)),
        # two copies of 8: one goes out, one comes back with twice the bytes
        (2, 1, (32 + 72 + 64 + 48, 8 + 96)),
    ],
)
def test_values_of_a_layer(experts: int, tensor: int, want: tuple[int, int]) -> None:
    fields = {name: getattr(SIZES, name) for name in Sizes.__dataclass_fields__}
    sizes = Sizes(**fields | {"experts_per_token": experts})
    assert layer_values(sizes, tensor) == want


# Three ends of 8, and of three layers of 168 values with inputs of 8 what is kept.
@pytest.mark.parametrize(
    ("kind", "want"),
    [("none", 24 + 3 * 168), ("full", 24 + 24 + 168), ("selective", 24 + 24 + 252)],
)
def test_checkpoints_keep_inputs(kind: str, want: int) -> None:
    assert kept_values(SIZES, kind, 1) == want


def parts_of(layout: Layout, **training: Any) -> dict[str, int]:
    values = {"activation_checkpoint": "full", "micro_batch_tokens": 10, "logprob_chunk_mib": 1}
    settings = TrainingConfig(**values | training)
    return step_bytes(WEIGHTS, SIZES, layout, settings, 64)


def test_parts_of_a_step_in_bfloat16() -> None:
    assert parts_of(ONE, dtype="bfloat16") == {
        # two layers of 240 and the head of 808
        "gathered weights": 2 * (480 + 808),
        # a layer's in bfloat16, the head's in float32
        "gradients in transit": 2 * 240 + 4 * 808,
        # of ten tokens, see above
        "activations": 2 * 10 * 216,
        "backward of a layer": 2 * 10 * 40,
        # four chunks of 1 MiB; the head's gradient of 800 in float32 and again in bfloat16
        "log-prob head": 4 * 2**20 + 6 * 800,
    }


def test_tensor_ranks_gather_the_head_they_divide() -> None:
    parts = parts_of(Layout(tensor=2), dtype="bfloat16")
    assert parts["log-prob head"] == 4 * 2**20 + 8 * 800
    assert parts["gathered weights"] == 2 * (240 + 408)


def test_one_float32_rank_gathers_nothing() -> None:
    parts = parts_of(ONE, dtype="float32")
    assert parts["gathered weights"] == parts["gradients in transit"] == 0
    assert parts_of(Layout(shard=2), dtype="float32")["gathered weights"] == 4 * (480 + 808)


def test_the_size_of_a_chunk_follows_from_the_device_unless_set() -> None:
    assert parts_of(ONE, logprob_chunk_mib=0)["log-prob head"] == 4 * 64 * 2**20 + 8 * 800


def test_an_engine_step_needs_a_layer_and_the_logits() -> None:
    engine = EngineConfig(dtype="bfloat16", max_num_seqs=5)
    # 2 * 8 + 3 * 16 values of 7 tokens; logits and log-probs of 5 sequences
    assert engine_bytes(WEIGHTS, SIZES, Config(engine=engine), 7) == {
        "engine weights": 2 * (800 + 60 + 9 + 240 + 8),
        "engine workspace": 2 * 7 * 64 + 8 * 5 * 100,
    }


@pytest.mark.parametrize(
    ("name", "shape", "want"),
    [
        ("layers.0.attention.qkv_linear.wq.weight", (16, 8), 32),
        # Two key-value heads, so two of four members have the same.
        ("layers.0.attention.qkv_linear.wk.weight", (8, 8), 32),
        ("layers.0.attention.qkv_linear.wv.weight", (8, 8), 32),
        ("layers.0.ffn_norm.weight", (8,), 8),
        ("layers.0.moe.router.gate.weight", (4, 8), 32),
        ("tok_embeddings.weight", (101, 8), 202),
    ],
)
def test_what_a_member_of_an_engine_of_four_holds(
    name: str, shape: tuple[int, ...], want: int
) -> None:
    assert engine_values(Parameter(name=name, shape=shape), SIZES, 4) == want


def test_members_divide_the_inner_width_and_not_the_logits() -> None:
    engine = EngineConfig(dtype="bfloat16", max_num_seqs=5, tensor_parallel=2)
    # 2 * 8 + 3 * 8 values of 7 tokens
    parts = engine_bytes(WEIGHTS, SIZES, Config(engine=engine), 7)
    assert parts["engine workspace"] == 2 * 7 * 40 + 8 * 5 * 100


@pytest.mark.parametrize(("tensor", "engine", "want"), [(1, 2, 4), (2, 1, 4), (2, 4, 2), (4, 2, 2)])
def test_engines_are_groups_of_ranks_and_tensor_ranks_share_theirs(
    tensor: int, engine: int, want: int
) -> None:
    assert Layout(shard=8 // tensor, tensor=tensor, engine=engine).num_engines == want


def test_cache_holds_a_key_and_a_value_per_layer() -> None:
    # 2 * 3 layers * 2 heads * 4 values * 2 bytes
    assert kv_bytes_per_token(SIZES, "bfloat16", 1) == 96
    assert (
        kv_bytes_per_token(SIZES, "bfloat16", 2) == kv_bytes_per_token(SIZES, "bfloat16", 4) == 48
    )
