"""Memory by part against sums done by hand, and what does not fit."""

from typing import Any

import pytest

from rollverify.config.load import read_config
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
    resident_bytes,
    step_bytes,
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
    layout = Layout(shard=1, tensor=1)
    # 800 + 60 + 9 + 240 = 1109 values of 4 bytes; Adam has two of them
    assert resident_bytes(WEIGHTS, layout) == {"weights": 4436, "optimizer": 8872}
    parts = step_bytes(WEIGHTS, SIZES, layout, training)
    assert parts["gradients"] == 4436
    # two layers of 240 and the head of 800 in bfloat16; the head's gradient is the largest
    assert parts["gathered layers"] == 2 * (480 + 800)
    assert parts["gradient sums"] == 4 * 800
    # a layer keeps 1600 values of ten tokens (see above), and its backward makes as many
    assert parts["activations"] == 2 * (160 + 1600)
    assert parts["backward of a layer"] == 2 * 1600
    # four chunks of 1 MiB; the head's gradient in float32 and again in bfloat16
    assert parts["log-prob head"] == 4 * 2**20 + 6 * 800


def test_one_float32_rank_gathers_nothing() -> None:
    training = TrainingConfig(
        dtype="float32", activation_checkpoint="none", micro_batch_tokens=10, logprob_chunk_mib=1
    )
    parts = step_bytes(WEIGHTS, SIZES, Layout(shard=1, tensor=1), training)
    assert parts["gathered layers"] == parts["gradient sums"] == 0


def test_cache_holds_a_key_and_a_value_per_layer() -> None:
    # 2 * 2 layers * 2 heads * 4 values * 2 bytes
    assert kv_bytes_per_token(SIZES, "bfloat16") == 64


LONGEST = 1024
"""Tokens of the longest sequence below."""


def config_of(**settings: dict[str, Any]) -> Any:
    rollout = {"max_prompt_tokens": 24, "max_response_tokens": LONGEST - 24}
    training = {"micro_batch_tokens": LONGEST + 1} | settings.pop("training", {})
    return read_config(settings={"rollout": rollout, "training": training, **settings})


def found(*, cache: int = GIB, device: int = 9 * GIB, **settings: dict[str, Any]) -> list[str]:
    """Problems of a plan with 9 GiB for decoding and 5 for training, and 1 MiB a token of cache."""
    plan = Plan(
        phases={
            "decoding": {"weights": 3 * GIB, "engine weights": 5 * GIB, "engine cache": cache},
            "training": {"weights": 3 * GIB, "activations": 2 * GIB},
        },
        engine_weights=5 * GIB,
        cache=cache,
        kv_per_token=GIB // LONGEST,
        device=device,
    )
    return problems(plan, config_of(**settings), num_layers=2, num_ranks=2, on_gpu=True)


def test_plan_that_just_fits_has_no_problem() -> None:
    assert found() == []


def test_one_token_less_than_a_response_is_a_problem() -> None:
    (line,) = found(cache=GIB - GIB // LONGEST)
    assert "one response of 1024 tokens needs 1.0" in line and "\n" not in line


def test_the_phase_that_does_not_fit_is_named_with_its_largest_parts() -> None:
    (line,) = found(device=9 * GIB - 1)
    assert line.startswith("decoding: 9.0 GiB do not fit into 9.0 GiB (most of it engine weights")
    assert line.endswith("use training.offload_optimizer = true or more ranks")
    lines = found(device=4 * GIB)
    assert [line.split(":")[0] for line in lines] == ["decoding", "training"]


FULL = "training.activation_checkpoint = 'full'"
ROW = "a smaller training.micro_batch_tokens"
SHORTER = "shorter rollout.max_response_tokens with training.micro_batch_tokens"
OFFLOAD, SLEEP = "training.offload_optimizer = true", "engine.sleep = true"
SHARE, CACHE = "a smaller engine.gpu_memory_utilization", "a smaller engine.kv_cache_gib"


@pytest.mark.parametrize(
    ("phase", "settings", "others", "expected"),
    [
        ("training", {}, {}, [OFFLOAD, "more ranks", FULL, ROW]),
        ("training", {"activation_checkpoint": "full"}, {}, [OFFLOAD, "more ranks", ROW]),
        # Of one layer nothing is recomputed; of two, selective keeps as much as full.
        ("training", {}, {"num_layers": 1}, [OFFLOAD, "more ranks", ROW]),
        ("training", {"activation_checkpoint": "selective"}, {}, [OFFLOAD, "more ranks", ROW]),
        # A row must hold the longest response.
        ("training", {"micro_batch_tokens": LONGEST}, {}, [OFFLOAD, "more ranks", FULL, SHORTER]),
        ("training", {"offload_optimizer": True}, {}, ["more ranks", FULL, ROW]),
        # The optimizer's own step has its state in any case.
        ("optimizer step", {}, {}, ["more ranks"]),
        ("decoding", {"offload_optimizer": True}, {}, ["more ranks"]),
        # Ranks on CPUs share the memory.
        ("at once", {}, {"on_gpu": False, "num_ranks": 1}, [FULL, ROW, CACHE]),
        ("at once", {}, {"on_gpu": False}, ["fewer ranks", FULL, ROW, CACHE]),
    ],
)
def test_only_what_would_change_something_is_a_cure(
    phase: str, settings: dict[str, Any], others: dict[str, Any], expected: list[str]
) -> None:
    values = {"num_layers": 2, "num_ranks": 2, "on_gpu": True} | others
    assert cures(config_of(training=settings), phase=phase, **values) == expected


@pytest.mark.parametrize(
    ("phase", "engine", "expected"),
    [
        ("decoding", {"gpu_memory_utilization": 0.9}, [OFFLOAD, "more ranks", SHARE]),
        ("training", {"gpu_memory_utilization": 0.9}, [OFFLOAD, "more ranks", FULL, ROW]),
        (
            "training",
            {"gpu_memory_utilization": 0.4, "sleep": False},
            [OFFLOAD, SLEEP, "more ranks", FULL, ROW, SHARE],
        ),
    ],
)
def test_a_share_that_was_asked_for_can_be_smaller(
    phase: str, engine: dict[str, Any], expected: list[str]
) -> None:
    config = config_of(engine=engine)
    assert cures(config, num_layers=2, num_ranks=2, on_gpu=True, phase=phase) == expected
