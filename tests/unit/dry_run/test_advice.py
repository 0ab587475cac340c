"""What a plan leads to: settings, a warning, problems and cures."""

from typing import Any

import pytest

from rollverify.config.load import read_config
from rollverify.config.tables import Config
from rollverify.dry_run.advice import (
    advised_settings,
    cures,
    num_in_flight,
    preemption_warning,
    problems,
)
from rollverify.dry_run.memory import GIB, Layout, Plan

LONGEST = 1024
"""Tokens of the longest sequence, each 1 MiB of cache."""
RANKS = Layout(shard=2)


def config_of(**settings: dict[str, Any]) -> Config:
    rollout = {
        "max_prompt_tokens": 24,
        "max_response_tokens": LONGEST - 24,
        "prompts_per_step": 4,
        "group_size": 2,
        "oversampling": 1.5,
    }
    training = {"micro_batch_tokens": LONGEST + 1} | settings.pop("training", {})
    return read_config(settings={"rollout": rollout, "training": training, **settings})


def plan_of(*, cache: int = 4 * GIB, device: int = 12 * GIB, share: float = 0.7499) -> Plan:
    """Of 12 GiB in the rollout and 8 in training."""
    trainer = {"weights": 3 * GIB, "optimizer": GIB}
    no_rows = {"activations": 0, "engine weights": 0, "engine cache": 0}
    return Plan(
        phases={
            "rollout": trainer | no_rows | {"engine weights": 4 * GIB, "engine cache": cache},
            "training": trainer | no_rows | {"activations": 4 * GIB},
            "optimizer step": trainer | no_rows,
        },
        device=device,
        cache=cache,
        kv_per_token=GIB // LONGEST,
        engine_needs=4 * GIB,
        share=share,
    )


def found(plan: Plan, **settings: dict[str, Any]) -> list[str]:
    return problems(config_of(**settings), plan, RANKS, 2)


def test_each_engine_has_its_part_of_what_is_in_flight() -> None:
    """1.5 * 4 * 2 responses over two engines; on-policy without the oversampling."""
    assert num_in_flight(config_of(), Layout(replicate=2, tensor=4)) == 6
    assert num_in_flight(config_of(method={"name": "on_policy"}), RANKS) == 4


def test_settings_hold_all_in_flight_or_what_the_cache_holds() -> None:
    """4096 tokens hold 8 responses of half the length, 2000 tokens hold 3."""
    lines = ["[engine]", "max_num_seqs = 6", "gpu_memory_utilization = 0.74"]
    assert advised_settings(config_of(), plan_of(), RANKS) == lines
    small = plan_of(cache=2000 * GIB // LONGEST, share=0.0)
    assert advised_settings(config_of(), small, RANKS) == ["[engine]", "max_num_seqs = 3"]


def test_a_cache_below_half_of_what_runs_is_warned_of() -> None:
    """Six responses of 512 tokens are 3072; two are 1024."""
    enough, few = plan_of(cache=3 * GIB), plan_of(cache=3 * GIB - 1)
    assert preemption_warning(config_of(), enough, RANKS) == []
    (line,) = preemption_warning(config_of(), few, RANKS)
    assert "6 responses of half the full length are 3,072 tokens" in line and "3,071" in line
    assert preemption_warning(config_of(engine={"max_num_seqs": 5}), few, RANKS) == []


def test_plan_that_just_fits_has_no_problem() -> None:
    assert found(plan_of()) == []


def test_one_token_less_than_a_response_is_a_problem() -> None:
    (line,) = found(plan_of(cache=GIB - GIB // LONGEST))
    assert "one response of 1024 tokens takes 1.0" in line and "\n" not in line
    assert f"use {OFFLOAD}, {GROUP}, more ranks or GPUs with more memory" in line
    (line,) = found(plan_of(cache=0), engine={"gpu_memory_utilization": 0.3})
    assert "use a larger engine.gpu_memory_utilization, training.offload_optimizer" in line


def test_the_phase_that_does_not_fit_is_named_with_its_largest_parts() -> None:
    (line,) = found(plan_of(device=12 * GIB - 1))
    assert line.startswith("rollout: 12.0 GiB do not fit into 12.0 GiB (most of it ")
    assert "engine weights 4.0, engine cache 4.0, weights 3.0" in line
    lines = found(plan_of(device=8 * GIB - 1))
    assert [line.split(":")[0] for line in lines] == ["rollout", "training"]


FULL = "training.activation_checkpoint = 'full'"
ROW = "a smaller training.micro_batch_tokens"
SHORTER = "a smaller rollout.max_response_tokens and training.micro_batch_tokens"
OFFLOAD, SLEEP = "training.offload_optimizer = true", "engine.sleep = true"
GROUP = "engine.tensor_parallel = 2"
SHARE, CACHE = "a smaller engine.gpu_memory_utilization", "a smaller engine.kv_cache_gib"


@pytest.mark.parametrize(
    ("phase", "training", "num_layers", "expected"),
    [
        ("training", {}, 2, [OFFLOAD, "more ranks", FULL, ROW]),
        ("training", {"activation_checkpoint": "full"}, 2, [OFFLOAD, "more ranks", ROW]),
        # Of one layer nothing is recomputed; of two, selective keeps as much as full.
        ("training", {}, 1, [OFFLOAD, "more ranks", ROW]),
        ("training", {"activation_checkpoint": "selective"}, 2, [OFFLOAD, "more ranks", ROW]),
        # A row must hold the longest response.
        ("training", {"micro_batch_tokens": LONGEST}, 2, [OFFLOAD, "more ranks", FULL, SHORTER]),
        # The optimizer's own step has its state in any case.
        ("optimizer step", {}, 2, ["more ranks"]),
        ("rollout", {}, 2, [OFFLOAD, GROUP, "more ranks", SHARE]),
    ],
)
def test_only_what_would_change_something_is_a_cure(
    phase: str, training: dict[str, Any], num_layers: int, expected: list[str]
) -> None:
    config = config_of(training=training)
    assert cures(config, plan_of(), RANKS, num_layers, phase) == expected


def test_an_engine_that_stays_awake_can_sleep() -> None:
    config = config_of(engine={"sleep": False})
    ways = cures(config, plan_of(cache=GIB), RANKS, 2, "rollout")
    # The cache is what one response needs.
    assert ways == [OFFLOAD, SLEEP, GROUP, "more ranks"]


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        (Layout(shard=3), []),
        (Layout(shard=12, engine=4), []),
        (Layout(shard=16, engine=4), ["engine.tensor_parallel = 8"]),
        (Layout(shard=16, engine=8), []),
    ],
)
def test_an_engine_spans_no_more_than_a_machine(layout: Layout, named: list[str]) -> None:
    """And as many ranks as divide all of them."""
    ways = cures(config_of(), plan_of(), layout, 2, "rollout")
    assert ways == [OFFLOAD, *named, "more ranks", SHARE]


@pytest.mark.parametrize(("layout", "first"), [(Layout(), []), (RANKS, [GROUP, "fewer ranks"])])
def test_ranks_on_cpus_share_the_memory(layout: Layout, first: list[str]) -> None:
    parts = {"activations": GIB, "engine weights": GIB, "engine cache": 4 * GIB}
    plan = Plan(
        phases={"at once": parts},
        device=GIB,
        cache=4 * GIB,
        kv_per_token=GIB // LONGEST,
        engine_needs=GIB,
        share=0.0,
    )
    assert cures(config_of(), plan, layout, 2, "at once") == [*first, FULL, ROW, CACHE]
    (line,) = problems(config_of(), plan, layout, 2)
    assert line.startswith("at once: 6.0 GiB do not fit into 1.0 GiB")
