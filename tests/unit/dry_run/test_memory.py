"""Memory by part against sums done by hand, and what does not fit."""

from collections.abc import Sequence
from typing import Any

import pytest

from rollverify.config.tables import TrainingConfig
from rollverify.dry_run.memory import (
    GIB,
    Layout,
    Parameter,
    Plan,
    Sizes,
    activation_bytes,
    cures,
    kv_bytes_per_token,
    largest_layer,
    owned,
    problems,
    trainer_bytes,
)

SIZES = Sizes(
    num_layers=2,
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
]


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


def test_largest_layer_is_gathered_whole() -> None:
    # layer 0: 60 + 9, layer 1: 240; halved by the tensor ranks
    assert largest_layer(WEIGHTS, Layout(shard=4, tensor=1)) == 240
    assert largest_layer(WEIGHTS, Layout(shard=4, tensor=2)) == 120


@pytest.mark.parametrize(
    ("kind", "tensor", "want"),
    [
        # layer: 10 * (4 * 8 + (3 * 4 + 4 * 2) * 4 + 3 * 16) = 10 * (32 + 80 + 48) = 1600
        ("none", 1, 2 * 1600),
        ("none", 2, 2 * 10 * (32 + 64)),
        # inputs of two layers, 2 * 10 * 8 = 160, and one layer
        ("full", 1, 160 + 1600),
        ("selective", 1, 160 + 1600),
    ],
)
def test_activations_of_ten_tokens(kind: str, tensor: int, want: int) -> None:
    assert activation_bytes(SIZES, 10, "bfloat16", kind, tensor) == 2 * want


def test_trainer_keeps_float32_whatever_it_computes_in() -> None:
    training = TrainingConfig(
        dtype="bfloat16", activation_checkpoint="full", micro_batch_tokens=10, logprob_chunk_mib=1
    )
    plan = trainer_bytes(WEIGHTS, SIZES, Layout(shard=1, tensor=1), training)
    # 800 + 60 + 9 + 240 = 1109 values of 4 bytes; Adam has two of them
    assert (plan["weights"], plan["gradients"], plan["optimizer"]) == (4436, 4436, 8872)
    # two layers of 240 and the head of 800 in bfloat16, one layer's gradient in float32
    assert plan["gathered layers"] == 2 * (480 + 800) + 4 * 240
    # four chunks of 1 MiB; the head's gradient in float32 and again in bfloat16
    assert plan["log-prob head"] == 4 * 2**20 + 6 * 800


def test_one_float32_rank_gathers_nothing() -> None:
    training = TrainingConfig(
        dtype="float32", activation_checkpoint="none", micro_batch_tokens=10, logprob_chunk_mib=1
    )
    plan = trainer_bytes(WEIGHTS, SIZES, Layout(shard=1, tensor=1), training)
    assert plan["gathered layers"] == 0


def test_cache_holds_a_key_and_a_value_per_layer() -> None:
    # 2 * 2 layers * 2 heads * 4 values * 2 bytes
    assert kv_bytes_per_token(SIZES, "bfloat16") == 64


def found(
    max_sequence_tokens: int = 1024, cures: Sequence[str] = ("a cure",), device: int = 9 * GIB
) -> list[str]:
    """Problems of a plan of 5 GiB for trainer and 4 for the engine that just fits into 9."""
    plan = Plan(
        trainer={"weights": 3 * GIB, "activations": 2 * GIB},
        engine_weights=2 * GIB,
        engine_budget=4 * GIB,
        kv_per_token=GIB // 1024,
        device=device,
    )
    return problems(plan, max_sequence_tokens, cures)


def test_plan_that_just_fits_has_no_problem() -> None:
    """4 GiB for the engine: 2 of weights, 1 of workspace, 1 of cache for 1024 tokens."""
    assert found() == []


def test_one_token_more_than_the_cache_holds_is_a_problem() -> None:
    (line,) = found(max_sequence_tokens=1025)
    assert "one response of 1025 tokens" in line and "\n" not in line


def test_one_byte_less_than_needed_is_a_problem() -> None:
    (line,) = found(device=9 * GIB - 1)
    assert line.startswith("9.0 GiB do not fit into 9.0 GiB: trainer 5.0 (most of it weights)")


def test_what_would_help_is_named_at_the_end() -> None:
    (line,) = found(device=1, cures=["more ranks", "a smaller row"])
    assert line.endswith("engine 4.0; use more ranks or a smaller row")


FULL = "training.activation_checkpoint = 'full'"
ROW = "a smaller training.micro_batch_tokens"
SHARE = "a smaller engine.gpu_memory_utilization"
SHORTER = "shorter rollout.max_response_tokens with training.micro_batch_tokens"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["more ranks", FULL, ROW, SHARE]),
        ({"activation_checkpoint": "full"}, ["more ranks", ROW, SHARE]),
        # Of one layer nothing is recomputed; of two, selective keeps as much as full.
        ({"num_layers": 1}, ["more ranks", ROW, SHARE]),
        ({"num_layers": 2, "activation_checkpoint": "selective"}, ["more ranks", ROW, SHARE]),
        ({"num_layers": 3, "activation_checkpoint": "selective"}, ["more ranks", FULL, ROW, SHARE]),
        # A row must hold the longest response.
        ({"micro_batch_tokens": 64}, ["more ranks", FULL, SHORTER, SHARE]),
        # The engine has no more than it needs.
        ({"spare_cache": 0}, ["more ranks", FULL, ROW]),
        # Ranks on CPUs share the memory.
        ({"on_gpu": False, "num_ranks": 1}, [FULL, ROW, "a smaller engine.kv_cache_gib"]),
        ({"on_gpu": False, "spare_cache": -1}, ["fewer ranks", FULL, ROW]),
    ],
)
def test_only_what_would_change_something_is_a_cure(
    changes: dict[str, Any], expected: list[str]
) -> None:
    training = {"activation_checkpoint": "none", "micro_batch_tokens": 65}
    for key in changes.keys() & training.keys():
        training[key] = changes[key]
    settings = {
        "num_layers": 2,
        "max_sequence_tokens": 64,
        "spare_cache": 1,
        "num_ranks": 2,
        "on_gpu": True,
    }
    others = {key: value for key, value in changes.items() if key not in training}
    assert cures(TrainingConfig(**training), **(settings | others)) == expected
