"""Rules that join several settings, and the check of the number of ranks.

Types and bounds of a single setting are checked in `setting`.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, cast

from rollverify.config.data_rules import check_data_rules
from rollverify.config.loss_rules import check_loss_rules
from rollverify.config.rule_error import RuleError
from rollverify.errors import ConfigError

if TYPE_CHECKING:
    from rollverify.config.schema import Config

RESERVED_ENGINE_OPTIONS = {
    "dtype": "set engine.dtype instead",
    "enable_return_routed_experts": "set routing_replay.mode = 'engine' instead",
    "enforce_eager": "set engine.enforce_eager instead",
    "generation_config": "it would change sampling; set the keys of [rollout] instead",
    "gpu_memory_utilization": "set engine.gpu_memory_utilization instead",
    "logprobs_mode": "training needs log-probs after temperature; remove it",
    "max_model_len": "it follows from rollout.max_prompt_tokens and rollout.max_response_tokens",
    "max_num_batched_tokens": "set engine.max_num_batched_tokens instead",
    "max_num_seqs": "set engine.max_num_seqs instead",
    "model": "set model.path instead",
    "seed": "set run.seed instead",
}
"""Engine arguments that RollVerify sets itself, each with what to do instead."""


def check_rules(config: Config) -> None:
    """Check every rule over several settings.

    Raises:
        RuleError: naming the first broken rule, its values and the cure.
    """
    _check_names(config)
    check_data_rules(config)
    _check_sampling(config)
    _check_sizes(config)
    _check_dynamic_sampling(config)
    _check_filter(config)
    _check_routing_replay(config)
    _check_engine_options(config)
    _check_schedule(config)
    check_loss_rules(config)
    _check_prepared_task(config)
    _check_prepared_model(config)


def _check_names(config: Config) -> None:
    name = config.run.name
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        rule = "must start with a letter or digit and hold only letters, digits, '.', '_' and '-'"
        raise RuleError(("run.name",), f"run.name {rule}, got {name!r}")
    for key, value in (
        ("run.output_dir", config.run.output_dir),
        ("prepare.cache_dir", config.prepare.cache_dir),
    ):
        if not value.strip():
            raise RuleError((key,), f"{key} must name a folder, got {value!r}")


def _check_sampling(config: Config) -> None:
    """Refuse samplers whose log-probs the trainer cannot reproduce, and groups without a baseline.

    The engine renormalises over the tokens that top-p or top-k keeps, the trainer uses the whole
    vocabulary: with probabilities .5 .3 .15 .05 and top_p = 0.8 every ratio would be 0.8.
    """
    rollout = config.rollout
    reason = "the engine's log-probs would be renormalised and every importance ratio biased"
    if rollout.top_p != 1.0:
        message = f"rollout.top_p must be 1.0 in training, got {rollout.top_p}: {reason}"
        raise RuleError(("rollout.top_p",), message)
    if rollout.top_k != -1:
        message = f"rollout.top_k must be -1 (off) in training, got {rollout.top_k}: {reason}"
        raise RuleError(("rollout.top_k",), message)
    if rollout.group_size == 1:
        raise RuleError(
            ("rollout.group_size",),
            "rollout.group_size must be >= 2, got 1: the group is the baseline, so the advantage "
            "of a single response is always 0 and nothing is learned",
        )


def _check_sizes(config: Config) -> None:
    rollout, engine, training = config.rollout, config.engine, config.training
    longest = rollout.max_sequence_tokens
    if training.micro_batch_tokens < longest:
        raise RuleError(
            (
                "training.micro_batch_tokens",
                "rollout.max_prompt_tokens",
                "rollout.max_response_tokens",
            ),
            "training.micro_batch_tokens must be >= rollout.max_prompt_tokens + "
            f"rollout.max_response_tokens = {longest}, got {training.micro_batch_tokens}",
        )
    for other, least in (
        ("rollout.max_prompt_tokens", rollout.max_prompt_tokens),
        ("engine.max_num_seqs", engine.max_num_seqs),
    ):
        if engine.max_num_batched_tokens < least:
            raise RuleError(
                ("engine.max_num_batched_tokens", other),
                f"engine.max_num_batched_tokens must be >= {other} = {least}, "
                f"got {engine.max_num_batched_tokens}",
            )


def _check_dynamic_sampling(config: Config) -> None:
    """Refuse limits that have no effect, or that the first group without signal would break."""
    options, prompts = config.dynamic_sampling, config.rollout.prompts_per_step
    defaults = type(options)()
    for name in ("max_dropped_batches", "at_cap"):
        value = getattr(options, name)
        if not options.enable and value != getattr(defaults, name):
            raise RuleError(
                (f"dynamic_sampling.{name}", "dynamic_sampling.enable"),
                f"dynamic_sampling.{name} = {value!r} has no effect without "
                "dynamic_sampling.enable = true; set it or remove the other",
            )
    if options.max_dropped_batches * prompts < 1:
        raise RuleError(
            ("dynamic_sampling.max_dropped_batches", "rollout.prompts_per_step"),
            "dynamic_sampling.max_dropped_batches must leave room for a group: at least 1 / "
            f"rollout.prompts_per_step = {1 / prompts:.3g}, got {options.max_dropped_batches:g}",
        )


def _check_filter(config: Config) -> None:
    """Refuse filters that have nothing to keep or nothing to discard."""
    options = config.filter
    if options.max_staleness < 1:
        raise RuleError(
            ("filter.max_staleness",),
            f"filter.max_staleness must be >= 1 step, got {options.max_staleness}: responses are "
            "checked after the optimizer step, when their newest segment is 1 step old, so none "
            "could pass; method.name = 'on_policy' resumes none",
        )
    if options.name != "off" and config.method.name == "on_policy":
        raise RuleError(
            ("filter.name", "method.name"),
            f"filter.name = {options.name!r} discards unfinished responses, but method.name = "
            "'on_policy' leaves none; set filter.name = 'off' or method.name = 'partial_rollout'",
        )


def _check_routing_replay(config: Config) -> None:
    """Refuse a replay that nobody records."""
    mode, reference = config.routing_replay.mode, config.verification.reference
    if mode == "trainer" and reference != "anchor" and config.method.name != "on_policy":
        raise RuleError(
            ("routing_replay.mode", "verification.reference"),
            "routing_replay.mode = 'trainer' records experts in the anchor pass, which "
            f"verification.reference = {reference!r} leaves out; set verification.reference = "
            "'anchor' or routing_replay.mode = 'engine'",
        )


def _check_engine_options(config: Config) -> None:
    for option, value in config.engine.options.items():
        cure = RESERVED_ENGINE_OPTIONS.get(option.replace("-", "_"))
        if cure is None and not _is_plain(value):
            cure = f"values are strings, finite numbers, booleans, lists and tables, got {value!r}"
        if cure is not None:
            message = f"engine.options cannot hold {option!r}: {cure}"
            raise RuleError(("engine.options",), message)


def _is_plain(value: object) -> bool:
    """Whether the value means the same in TOML and JSON (no dates, no nan, no infinity)."""
    if isinstance(value, dict):
        return all(map(_is_plain, cast(dict[str, object], value).values()))
    if isinstance(value, list):
        return all(map(_is_plain, cast(list[object], value)))
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _check_schedule(config: Config) -> None:
    training = config.training
    if training.warmup_steps > training.steps:
        raise RuleError(
            ("training.warmup_steps", "training.steps"),
            f"training.warmup_steps must be <= training.steps = {training.steps}, "
            f"got {training.warmup_steps}",
        )


def _check_prepared_task(config: Config) -> None:
    prepare = config.prepare
    if prepare.min_steps > prepare.max_steps:
        raise RuleError(
            ("prepare.min_steps", "prepare.max_steps"),
            f"prepare.min_steps must be <= prepare.max_steps = {prepare.max_steps}, "
            f"got {prepare.min_steps}",
        )
    if prepare.noise_low > prepare.noise_high:
        raise RuleError(
            ("prepare.noise_low", "prepare.noise_high"),
            f"prepare.noise_low must be <= prepare.noise_high = {prepare.noise_high}, "
            f"got {prepare.noise_low}",
        )


def _check_prepared_model(config: Config) -> None:
    prepare = config.prepare
    if prepare.num_heads % prepare.num_kv_heads:
        raise RuleError(
            ("prepare.num_heads", "prepare.num_kv_heads"),
            f"prepare.num_heads must be a multiple of prepare.num_kv_heads = "
            f"{prepare.num_kv_heads}, got {prepare.num_heads}",
        )
    if prepare.head_dim % 32:
        message = (
            f"prepare.head_dim must be a multiple of 32, got {prepare.head_dim}: the engine has no "
            "CPU attention kernel for others"
        )
        raise RuleError(("prepare.head_dim",), message)
    if prepare.num_experts:
        _check_prepared_experts(config)


def _check_prepared_experts(config: Config) -> None:
    prepare = config.prepare
    if prepare.num_experts_per_token > prepare.num_experts:
        raise RuleError(
            ("prepare.num_experts_per_token", "prepare.num_experts"),
            f"prepare.num_experts_per_token must be <= prepare.num_experts = "
            f"{prepare.num_experts}, got {prepare.num_experts_per_token}",
        )
    for key in ("hidden_size", "moe_intermediate_size"):
        if getattr(prepare, key) % 32:
            message = (
                f"prepare.{key} must be a multiple of 32 with experts, got "
                f"{getattr(prepare, key)}: the engine has no CPU kernel for others"
            )
            raise RuleError((f"prepare.{key}",), message)


def check_world_size(config: Config, world_size: int) -> int:
    """Check that the parallelism and the batch fit the number of ranks.

    Args:
        config: the resolved config.
        world_size: number of ranks that torchrun started.

    Returns:
        Number of data-parallel ranks, replicate * shard; each takes an equal share of the prompts.

    Raises:
        ConfigError: replicate * shard * tensor is not the number of ranks, the experts do not
            divide over them, or prompts_per_step does not divide by the data-parallel ranks.
    """
    parallelism = config.parallelism
    replicate, tensor = parallelism.data_parallel_replicate, parallelism.tensor_parallel
    if parallelism.data_parallel_shard != -1:
        shard = parallelism.data_parallel_shard
    else:
        shard = max(1, world_size // (replicate * tensor))
    ranks = f"{world_size} rank" if world_size == 1 else f"{world_size} ranks"
    if replicate * shard * tensor != world_size:
        raise ConfigError(
            f"parallelism needs {replicate * shard * tensor} ranks (data_parallel_replicate "
            f"{replicate} * data_parallel_shard {shard} * tensor_parallel {tensor}) but {ranks} "
            f"started; start that many (NGPU={replicate * shard * tensor}) or change [parallelism]"
        )
    if shard * tensor % parallelism.expert_parallel:
        raise ConfigError(
            f"parallelism.expert_parallel = {parallelism.expert_parallel} must divide "
            f"data_parallel_shard * tensor_parallel = {shard * tensor} with {ranks}"
        )
    data_ranks = replicate * shard
    prompts = config.rollout.prompts_per_step
    if prompts % data_ranks:
        raise ConfigError(
            f"rollout.prompts_per_step must be a multiple of the {data_ranks} data-parallel ranks, "
            f"got {prompts}; the next one is {prompts + -prompts % data_ranks}"
        )
    return data_ranks
