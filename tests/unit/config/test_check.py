"""Rules over several settings, and the number of ranks."""

import dataclasses
import datetime
import math

import pytest

from rollverify.config.check import RuleError, check_world_size
from rollverify.config.schema import TABLES, Config
from rollverify.errors import ConfigError

BROKEN = [
    ({"rollout.group_size": 1}, "rollout.group_size must be >= 2, got 1"),  # AD03
    ({"rollout.top_p": 0.8}, "rollout.top_p must be 1.0 in training, got 0.8"),  # LP03
    ({"rollout.top_k": 20}, "rollout.top_k must be -1 (off) in training, got 20"),  # LP03
    # 32 prompt + 352 response tokens = 384
    ({"training.micro_batch_tokens": 383}, "rollout.max_response_tokens = 384, got 383"),
    (
        {"engine.max_num_batched_tokens": 31, "engine.max_num_seqs": 8},
        "engine.max_num_batched_tokens must be >= rollout.max_prompt_tokens = 32, got 31",
    ),
    ({"engine.max_num_batched_tokens": 511}, "must be >= engine.max_num_seqs = 512, got 511"),
    # Unfinished responses are at least 1 step old when they are checked.
    ({"filter.max_staleness": 0}, "filter.max_staleness must be >= 1 step, got 0: responses are"),
    ({"filter.max_staleness": -3}, "filter.max_staleness must be >= 1 step, got -3"),
    (
        {"filter.name": "ops", "method.name": "on_policy"},
        "filter.name = 'ops' discards unfinished responses, but method.name = 'on_policy' leaves "
        "none; set filter.name = 'off'",
    ),
    ({"filter.name": "staleness", "method.name": "on_policy"}, "or method.name = 'partial_roll"),
    ({"dynamic_sampling.at_cap": "train"}, "no effect without dynamic_sampling.enable = true"),
    ({"dynamic_sampling.max_dropped_batches": 2.0}, "max_dropped_batches = 2.0 has no effect"),
    (
        # 32 prompts: 1 / 32 = 0.03125
        {"dynamic_sampling.enable": True, "dynamic_sampling.max_dropped_batches": 0.03},
        "must leave room for a group: at least 1 / rollout.prompts_per_step = 0.0312, got 0.03",
    ),
    ({"engine.options": {"dtype": "half"}}, "cannot hold 'dtype': set engine.dtype instead"),
    ({"engine.options": {"max-num-seqs": 2}}, "cannot hold 'max-num-seqs'"),
    ({"engine.options": {"a": [{"b": float("nan")}]}}, "cannot hold 'a': values are strings"),
    ({"engine.options": {"a": datetime.date(2024, 1, 1)}}, "cannot hold 'a': values are strings"),
    ({"training.warmup_steps": 61}, "must be <= training.steps = 60, got 61"),
    ({"prepare.min_steps": 81}, "prepare.min_steps must be <= prepare.max_steps = 80, got 81"),
    ({"prepare.noise_low": 0.8}, "must be <= prepare.noise_high = 0.7, got 0.8"),
    ({"prepare.num_kv_heads": 3}, "must be a multiple of prepare.num_kv_heads = 3, got 2"),
    ({"prepare.head_dim": 16}, "prepare.head_dim must be a multiple of 32, got 16"),
    ({"prepare.num_experts": 1}, "num_experts_per_token must be <= prepare.num_experts = 1, got 2"),
    (
        {"prepare.num_experts": 4, "prepare.moe_intermediate_size": 40},
        "prepare.moe_intermediate_size must be a multiple of 32 with experts, got 40",
    ),
    (
        {"prepare.num_experts": 4, "prepare.hidden_size": 48},
        "prepare.hidden_size must be a multiple of 32 with experts, got 48",
    ),
    ({"run.name": "a/b"}, "run.name must start with a letter or digit"),
    ({"run.output_dir": " "}, "run.output_dir must name a folder"),
    ({"prepare.cache_dir": ""}, "prepare.cache_dir must name a folder"),
    ({"data.train": "train.jsonl"}, "set data.test or evaluation.enable = false"),
]


def build(changes: dict[str, object]) -> Config:
    """A default config with some settings changed by dotted key."""
    tables: dict[str, dict[str, object]] = {name: {} for name in TABLES}
    for key, value in changes.items():
        table, _, name = key.partition(".")
        tables[table][name] = value
    return Config(**{name: TABLES[name](**entries) for name, entries in tables.items()})  # type: ignore[arg-type]


@pytest.mark.parametrize(("changes", "message"), BROKEN)
def test_broken_rule_is_refused(changes: dict[str, object], message: str) -> None:
    """AD03, LP03 and the rules of sizes: the message names key, value and cure on one line."""
    with pytest.raises(RuleError) as caught:
        build(changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert set(changes) & set(caught.value.keys)


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout.group_size": 2},
        {"training.micro_batch_tokens": 384},  # 32 + 352
        {"engine.max_num_batched_tokens": 512},
        {"filter.name": "staleness", "filter.max_staleness": 1},
        {"filter.name": "ops", "method.name": "partial_rollout"},
        {"method.name": "on_policy"},
        {"dynamic_sampling.enable": True, "dynamic_sampling.max_dropped_batches": 1 / 32},
        # The ablation of both stages: the same as partial_rollout.
        {"verification.segment_threshold": math.inf, "verification.token_threshold": math.inf},
        {"training.warmup_steps": 60},
        {"prepare.min_steps": 80},
        {"prepare.noise_low": 0.7},
        {"prepare.num_experts": 2},
        {"prepare.hidden_size": 48},  # dense
        {"data.train": "train.jsonl", "evaluation.enable": False},
        {"engine.options": {"block_size": 16, "a": {"b": [1, "c", True, 0.5]}}},
    ],
)
def test_value_at_the_edge_of_a_rule_is_accepted(changes: dict[str, object]) -> None:
    build(changes)


def test_rules_hold_for_replaced_tables() -> None:
    config = Config()
    with pytest.raises(ConfigError, match="group_size"):
        dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, group_size=1))


@pytest.mark.parametrize(
    ("replicate", "shard", "tensor", "world", "data_ranks"),
    [(1, -1, 1, 1, 1), (1, -1, 1, 4, 4), (2, -1, 2, 8, 4), (2, 2, 1, 4, 4), (1, 1, 2, 2, 1)],
)
def test_world_size_gives_data_parallel_ranks(
    replicate: int, shard: int, tensor: int, world: int, data_ranks: int
) -> None:
    """data_ranks = world / tensor."""
    config = build(
        {
            "parallelism.data_parallel_replicate": replicate,
            "parallelism.data_parallel_shard": shard,
            "parallelism.tensor_parallel": tensor,
        }
    )
    assert check_world_size(config, world) == data_ranks


@pytest.mark.parametrize(
    ("changes", "world", "message"),
    [
        # 1 * 2 * 1 = 2 ranks needed
        ({"parallelism.data_parallel_shard": 2}, 1, "needs 2 ranks .* but 1 rank started"),
        ({"parallelism.data_parallel_shard": 2}, 4, r"but 4 ranks started.*\(NGPU=2\)"),
        # 3 ranks do not divide by tensor 2: 3 // 2 = 1 shard, 1 * 1 * 2 = 2
        ({"parallelism.tensor_parallel": 2}, 3, "needs 2 ranks"),
        ({"parallelism.tensor_parallel": 2}, 1, "needs 2 ranks"),
        # 32 % 3 = 2; the next multiple of 3 is 33
        ({}, 3, "multiple of the 3 data-parallel ranks, got 32; the next one is 33"),
        ({"parallelism.expert_parallel": 2}, 1, "expert_parallel = 2 must divide .* = 1"),
    ],
)
def test_world_size_that_does_not_fit_is_refused(
    changes: dict[str, object], world: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_world_size(build(changes), world)
