"""Rules over several settings: what is refused, with its cure, and what stands at the edge."""

import datetime
import math
from typing import Any

import pytest
from pydantic import ValidationError

from rollverify.config.load import read_config
from rollverify.config.rules import check_world_size
from rollverify.config.tables import Config, RolloutConfig
from rollverify.errors import ConfigError

BEHAVIOR = {"loss.denominator": "behavior", "correction.name": "none"}
GSPO = {"loss.name": "gspo", "loss.aggregation": "sequence_mean"}
AT_SAMPLING = {"loss.denominator": "anchor_at_sampling"}
DECOUPLED = {"loss.name": "decoupled_ppo", "correction.name": "none"}
MATHS = {"data.reward": "math", "data.test": "gsm8k:test.jsonl"}
FILES = {"data.train": "a.jsonl", "data.test": "b.jsonl"}

BROKEN = [
    ({"rollout.top_p": 0.8}, "rollout.top_p must be 1.0 in training, got 0.8"),  # LP03
    ({"rollout.top_k": 20}, "rollout.top_k must be -1 (off) in training, got 20"),  # LP03
    # 32 prompt + 352 response tokens = 384
    ({"training.micro_batch_tokens": 383}, "rollout.max_response_tokens = 384, got 383"),
    (
        {"engine.max_num_batched_tokens": 31, "engine.max_num_seqs": 8},
        "engine.max_num_batched_tokens must be >= rollout.max_prompt_tokens = 32, got 31",
    ),
    ({"engine.max_num_batched_tokens": 511}, "must be >= engine.max_num_seqs = 512, got 511"),
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
    ({"engine.options": {"a": [{"b": math.nan}]}}, "cannot hold 'a': values are strings"),
    ({"engine.options": {"a": datetime.date(2024, 1, 1)}}, "cannot hold 'a': values are strings"),
    (
        {"loss.name": "m:f", "loss.settings": {"a": math.inf}},
        "loss.settings cannot hold 'a': values are strings",
    ),
    ({"training.warmup_steps": 61}, "must be <= training.steps = 60, got 61"),
    ({"parallelism.data_parallel_shard": 0}, "data_parallel_shard must be >= 1, or -1"),
    (
        {"routing_replay.mode": "trainer", "verification.against": "behavior"},
        "set verification.against = 'anchor' or routing_replay.mode = 'engine'",
    ),
    ({"prepare.min_steps": 81}, "prepare.min_steps must be <= prepare.max_steps = 80, got 81"),
    ({"prepare.noise_low": 0.8}, "must be <= prepare.noise_high = 0.7, got 0.8"),
    ({"prepare.num_kv_heads": 3}, "must be a multiple of prepare.num_kv_heads = 3, got 2"),
    ({"prepare.num_experts": 1}, "num_experts_per_token must be <= prepare.num_experts = 1, got 2"),
    (
        {"prepare.num_experts": 4, "prepare.moe_intermediate_size": 40},
        "prepare.moe_intermediate_size must be a multiple of 32 with experts, got 40",
    ),
    (
        {"prepare.num_experts": 4, "prepare.hidden_size": 48},
        "prepare.hidden_size must be a multiple of 32 with experts, got 48",
    ),
    ({"run.output_dir": " "}, "run.output_dir must name a folder"),
    ({"prepare.cache_dir": ""}, "prepare.cache_dir must name a folder"),
    ({"data.train": "a.jsonl"}, "set data.test or evaluation.enable = false"),
    ({"data.train_columns": {"prompt": "q"}}, "data.train_columns is set but data.train is not"),
    ({"data.test_hub": {"split": "dev"}}, "data.test_hub is set but data.test is not"),
    ({"data.template": "boxd"}, "must be one of auto, none, boxed, answer_line or a text"),
    ({"data.template": "{prompt} {prompt}"}, "a text that holds {prompt} once"),
    ({"data.template": ""}, "data.template must be one of"),
    ({"data.system_prompt": "Be brief."}, "set data.chat_template = true"),
    ({"data.reward": "math"}, "which the built-in task never asks for"),
    (MATHS | {"data.template": "answer_line"}, "'answer_line' never asks for the \\boxed{}"),
    (MATHS | {"data.template": "none"}, "set data.template = 'boxed', or 'auto' if"),
    (MATHS | {"data.template": "Solve: {prompt}"}, "'Solve: {prompt}' never asks for the"),
    ({"loss.name": "gspo"}, "'gspo' needs loss.aggregation = 'sequence_mean', got 'token_mean'"),
    (GSPO, "correction.name = 'truncated' with correction.level = 'token' weighs single tokens"),
    (GSPO | {"correction.name": "icepop"}, "'icepop' weighs single tokens, but loss.name = 'gspo'"),
    (GSPO | {"loss.name": "gspo_token", "correction.name": "mask_stale"}, "one ratio per response"),
    ({"loss.name": "dr_grpo"}, "'dr_grpo' needs advantage.std = 'none' and loss.aggregation"),
    ({"loss.name": "dr_grpo", "advantage.std": "none"}, "got 'none' and 'token_mean'"),
    (
        {"loss.denominator": "behavior"},
        "loss.denominator = 'behavior' with correction.name = 'truncated' counts the gap to the "
        "engine twice: the ratio divides by its log-probs already; set correction.name = 'none'",
    ),
    (BEHAVIOR | {"correction.name": "masked"}, "twice"),
    (BEHAVIOR | {"correction.name": "icepop"}, "twice"),
    (
        {"loss.name": "reinforce"} | BEHAVIOR,
        "'behavior' has no effect with loss.name = 'reinforce'",
    ),
    (
        AT_SAMPLING | {"verification.against": "behavior"},
        "not recorded with verification.against = 'behavior'",
    ),
    (
        AT_SAMPLING | {"method.name": "partial_rollout", "verification.measure": False},
        "verification.measure = false; set verification.against = 'anchor'",
    ),
    ({"loss.name": "decoupled_ppo"}, "weigh by denominator / behavior twice; set correction.name"),
    ({"loss.name": "decoupled_ppo"} | BEHAVIOR, "where its weight is always 1"),
    ({"loss.masked_in_denominator": False}, "has no effect with correction.name = 'truncated'"),
    (
        DECOUPLED | {"loss.masked_in_denominator": False, "loss.cap_action": "clamp"},
        "loss.name = 'decoupled_ppo', which drop no token; remove it, or set correction.name to",
    ),
    ({"loss.dual_clip": 0.5}, "loss.dual_clip must be > 1, or 0 for none, got 0.5"),
    ({"advantage.baseline": "leave_one_out"}, "needs advantage.std = 'none', got 'unbiased'"),
    ({"advantage.overlong_buffer_tokens": 353}, "must be <= rollout.max_response_tokens = 352"),
    ({"training.minibatches": 3}, "must divide rollout.prompts_per_step = 32, got 3"),
    (
        {"correction.name": "masked", "correction.low": 3.0},
        "correction.low must be <= correction.high = 2.0, got 3.0",
    ),
]

ACCEPTED = [
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
    {"data.test": "b.jsonl"},
    {"data.template": "Q: {prompt}\nA: {braces}"},
    {"data.system_prompt": "Be brief.", "data.chat_template": True},
    MATHS,
    MATHS | {"data.template": "boxed"},
    MATHS | {"data.template": "{prompt} Use \\boxed{}."},
    {"data.reward": "rewards.py:length"},
    FILES | {"data.train_columns": {"prompt": "q", "answer": "a", "id": "i"}},
    FILES | {"data.test_hub": {"subset": "main", "split": "dev", "revision": "v1"}},
    GSPO | {"correction.level": "sequence"},
    GSPO | {"correction.name": "geometric_mask"},
    GSPO | BEHAVIOR | {"loss.clip_low": 0.2, "loss.clip_high": 0.3},
    {"loss.name": "dr_grpo", "advantage.std": "none", "loss.aggregation": "constant_length"},
    BEHAVIOR | {"correction.name": "mask_stale"},
    BEHAVIOR | {"correction.name": "opsm", "correction.delta": 0.1},
    AT_SAMPLING,
    # Nothing is stale there, so the policy before the step is the anchor of every token.
    AT_SAMPLING | {"method.name": "on_policy", "verification.against": "behavior"},
    AT_SAMPLING | {"method.name": "partial_rollout", "filter.name": "ops"},
    DECOUPLED | {"loss.weight_cap": math.inf},
    {"loss.name": "decoupled_ppo", "correction.name": "geometric_mask"},
    DECOUPLED | {"loss.masked_in_denominator": False},
    {"correction.name": "icepop", "loss.masked_in_denominator": False},
    {"loss.name": "m:f", "loss.settings": {"a": {"b": [1.0]}}, "loss.masked_in_denominator": False},
    {"advantage.baseline": "leave_one_out", "advantage.std": "none"},
    {"advantage.overlong_buffer_tokens": 352},
    {"training.minibatches": 32},
    {"correction.name": "none", "correction.threshold": 5.0},
    {"loss.dual_clip": 3.0},
    {"loss.entropy_coefficient": -0.01, "kl.coefficient": 0.1, "kl.estimator": "k1"},
]


def build(changes: dict[str, Any]) -> Config:
    """A default config with some settings changed by dotted key."""
    document: dict[str, Any] = {}
    for key, value in changes.items():
        table, _, name = key.partition(".")
        document.setdefault(table, {})[name] = value
    return read_config(settings=document)


@pytest.mark.parametrize(("changes", "message"), BROKEN)
def test_broken_rule_is_refused(changes: dict[str, Any], message: str) -> None:
    """The message names key, value and cure on one line, and is reported where a key was set."""
    with pytest.raises(ConfigError) as caught:
        build(changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("settings: ")


@pytest.mark.parametrize("changes", ACCEPTED)
def test_value_at_the_edge_of_a_rule_is_accepted(changes: dict[str, Any]) -> None:
    build(changes)


def test_rules_hold_for_tables_built_in_code() -> None:
    with pytest.raises(ValidationError, match=r"rollout\.top_k must be -1"):
        Config(rollout=RolloutConfig(top_k=5))


@pytest.mark.parametrize(
    ("replicate", "shard", "tensor", "world", "data_ranks"),
    [(1, -1, 1, 1, 1), (1, -1, 1, 4, 4), (2, -1, 2, 8, 4), (2, 2, 1, 4, 4), (1, 1, 2, 2, 1)],
)
def test_world_size_gives_data_parallel_ranks(
    replicate: int, shard: int, tensor: int, world: int, data_ranks: int
) -> None:
    """data_ranks = world / tensor."""
    changes = {"data_parallel_replicate": replicate, "data_parallel_shard": shard}
    config = read_config(settings={"parallelism": changes | {"tensor_parallel": tensor}})
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
    changes: dict[str, Any], world: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_world_size(build(changes), world)
