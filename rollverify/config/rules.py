"""Rules across settings, each with its cure; every key in a message gets the file that set it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from rollverify.config.losses import (
    CustomLoss,
    DecoupledPpo,
    GeometricMask,
    Grpo,
    Icepop,
    Masked,
    Truncated,
)
from rollverify.errors import ConfigError

if TYPE_CHECKING:
    from rollverify.config.tables import Config

ENGINE_OPTIONS_SET_ELSEWHERE = {
    "async_scheduling": "it follows from the device; remove it",
    "cpu_offload_gb": "weights are rewritten in place, so they must be on the GPU; remove it",
    "data_parallel_size": "every rank has an engine of its own; remove it",
    "distributed_executor_backend": "the engine lives in the trainer's process; remove it",
    "dtype": "set engine.dtype instead",
    "enable_chunked_prefill": "it follows from the device; remove it",
    "enable_expert_parallel": "every rank's engine holds all experts; remove it",
    "enable_lora": "weights are rewritten in place, adapters are not; remove it",
    "enable_return_routed_experts": "set routing_replay.mode = 'engine' instead",
    "enable_sleep_mode": "set engine.sleep instead",
    "enforce_eager": "set engine.compile instead",
    "generation_config": "it would change sampling; set the keys of [rollout] instead",
    "gpu_memory_utilization": "set engine.gpu_memory_utilization instead",
    "kv_cache_dtype": "its log-probs would not be those of the weights; remove it",
    "kv_cache_memory_bytes": "set engine.kv_cache_gib or engine.gpu_memory_utilization instead",
    "load_format": "the first weights come from model.path, the next from the trainer; remove it",
    "logprobs_mode": "training needs log-probs after temperature; remove it",
    "max_model_len": "it follows from rollout.max_prompt_tokens and rollout.max_response_tokens",
    "max_num_batched_tokens": "set engine.max_num_batched_tokens instead",
    "max_num_seqs": "set engine.max_num_seqs instead",
    "model": "set model.path instead",
    "moe_backend": "only 'triton' keeps the layout that weights are written in; remove it",
    "pipeline_parallel_size": "the engine lives in one process; remove it",
    "quantization": "quantised weights cannot be rewritten in place; remove it",
    "seed": "set run.seed instead",
    "skip_tokenizer_init": "the engine takes and gives token ids; remove it",
    "speculative_config": "its tokens have no log-probs of this policy; remove it",
    "tensor_parallel_size": "set engine.tensor_parallel instead",
    "tokenizer": "set model.path instead",
}

TEMPLATE_NAMES = ("auto", "none", "boxed", "answer_line")
"""Values of `data.template` that are not a text of their own."""

RATIO_WEIGHTS = ("truncated", "masked", "icepop")
"""Corrections whose weight is rho = denominator / behavior itself."""

MASKS = ("masked", "icepop", "geometric_mask", "mask_stale", "opsm")
"""Corrections that drop tokens."""

DEEPEST = 20
"""Levels of tables and lists in a value of `engine.options` or `loss.settings`."""


def broken_rules(config: Config) -> Iterator[str]:
    """Each rule across settings that the config breaks, with its cure."""
    yield from _data(config)
    yield from _sampling(config)
    yield from _sizes(config)
    yield from _method(config)
    yield from _free_tables(config)
    yield from _single_settings_of_losses(config)
    yield from _ratio_of_the_loss(config)
    yield from _sequence_losses(config)
    yield from _averages(config)
    yield from config.prepare.broken_rules()


def _data(config: Config) -> Iterator[str]:
    data = config.data
    if not config.run.output_dir.strip():
        yield f"run.output_dir must name a folder, got {config.run.output_dir!r}"
    if data.train and not data.test and config.evaluation.enable:
        yield (
            "data.train is set but data.test is not, so accuracy would be measured on another "
            "task; set data.test or evaluation.enable = false"
        )
    for place in ("train", "test"):
        for table in (f"{place}_columns", f"{place}_hub"):
            if getattr(data, table) and not getattr(data, place):
                yield (
                    f"data.{table} is set but data.{place} is not, so it would change nothing; "
                    f"set data.{place} or remove it"
                )
    if data.reward == "math" and not data.train and not data.test:
        yield (
            "data.reward = 'math' reads the last \\boxed{} of a response, which the built-in task "
            "never asks for; set data.train and data.test, or data.reward = 'exact_answer'"
        )
    if data.reward == "math" and (data.train or data.test):
        yield from _unread_answers(data.template, data.system_prompt)
    if data.template not in TEMPLATE_NAMES and data.template.count("{prompt}") != 1:
        yield (
            f"data.template must be one of {', '.join(TEMPLATE_NAMES)} or a text that holds "
            f"{{prompt}} once, got {data.template[:60]!r}"
        )
    if data.system_prompt and not data.chat_template:
        yield (
            "data.system_prompt is sent through the chat template, which is off; set "
            "data.chat_template = true or put the text into data.template"
        )


def _unread_answers(template: str, system_prompt: str) -> Iterator[str]:
    """Wordings after which the maths reward finds nothing to read: every reward would be 0."""
    if template in ("auto", "boxed") or any(
        box in template + system_prompt for box in ("\\boxed", "\\fbox")
    ):
        return
    yield (
        f"data.template = {template[:60]!r} never asks for the \\boxed{{}} that "
        "data.reward = 'math' reads; set data.template = 'boxed', or "
        "'auto' if the file's prompts ask for it themselves"
    )


def _sampling(config: Config) -> Iterator[str]:
    """Samplers whose log-probs the trainer cannot reproduce, and limits without effect.

    The engine renormalises over the tokens that top-p or top-k keeps, the trainer uses the whole
    vocabulary: with probabilities .5 .3 .15 .05 and top_p = 0.8 every ratio would be 0.8.
    """
    rollout, dynamic = config.rollout, config.dynamic_sampling
    reason = "the engine's log-probs would be renormalised and every importance ratio biased"
    if rollout.top_p != 1.0:
        yield f"rollout.top_p must be 1.0 in training, got {rollout.top_p}: {reason}"
    if rollout.top_k != -1:
        yield f"rollout.top_k must be -1 (off) in training, got {rollout.top_k}: {reason}"
    for name in ("max_dropped_batches", "at_cap"):
        value = getattr(dynamic, name)
        if not dynamic.enable and value != type(dynamic).model_fields[name].default:
            yield (
                f"dynamic_sampling.{name} = {value!r} has no effect without "
                "dynamic_sampling.enable = true; set it or remove the other"
            )
    if dynamic.max_dropped_batches * rollout.prompts_per_step < 1:
        yield (
            "dynamic_sampling.max_dropped_batches must leave room for a group: at least 1 / "
            f"rollout.prompts_per_step = {1 / rollout.prompts_per_step:.3g}, got "
            f"{dynamic.max_dropped_batches:g}"
        )


def _sizes(config: Config) -> Iterator[str]:
    rollout, engine, training = config.rollout, config.engine, config.training
    longest = rollout.max_sequence_tokens
    if training.micro_batch_tokens < longest:
        yield (
            "training.micro_batch_tokens must be >= rollout.max_prompt_tokens + "
            f"rollout.max_response_tokens = {longest}, got {training.micro_batch_tokens}"
        )
    for other, least in (
        ("rollout.max_prompt_tokens", rollout.max_prompt_tokens),
        ("engine.max_num_seqs", engine.max_num_seqs),
    ):
        if engine.max_num_batched_tokens < least:
            yield (
                f"engine.max_num_batched_tokens must be >= {other} = {least}, "
                f"got {engine.max_num_batched_tokens}"
            )
    if training.warmup_steps > training.steps:
        yield (
            f"training.warmup_steps must be <= training.steps = {training.steps}, "
            f"got {training.warmup_steps}"
        )
    if rollout.prompts_per_step % training.minibatches:
        yield (
            "training.minibatches must divide rollout.prompts_per_step = "
            f"{rollout.prompts_per_step}, got {training.minibatches}: a minibatch takes whole "
            "prompts, as many as the others"
        )
    if config.parallelism.data_parallel_shard == 0:
        yield "parallelism.data_parallel_shard must be >= 1, or -1 for the ranks left, got 0"


def _method(config: Config) -> Iterator[str]:
    """A filter that has nothing to discard, and a replay that nobody records."""
    name, method, mode = config.filter.name, config.method.name, config.routing_replay.mode
    if name != "off" and method == "on_policy":
        yield (
            f"filter.name = {name!r} discards unfinished responses, but method.name = "
            "'on_policy' leaves none; set filter.name = 'off' or method.name = 'partial_rollout'"
        )
    reference = config.verification.against
    if mode == "trainer" and reference != "anchor" and method != "on_policy":
        yield (
            "routing_replay.mode = 'trainer' records experts in the anchor pass, which "
            f"verification.against = {reference!r} leaves out; set verification.against = "
            "'anchor' or routing_replay.mode = 'engine'"
        )


def _free_tables(config: Config) -> Iterator[str]:
    """Engine options that are set elsewhere, and values that no TOML or JSON can hold."""
    tables = [("engine.options", config.engine.options)]
    if isinstance(config.loss, CustomLoss):
        tables.append(("loss.settings", config.loss.settings))
    for key, entries in tables:
        for option, value in entries.items():
            cure = None
            if key == "engine.options":
                cure = ENGINE_OPTIONS_SET_ELSEWHERE.get(option.replace("-", "_"))
            if cure is None and not _is_plain(value):
                cure = (
                    "values are strings, finite numbers, booleans, and lists and tables of them, "
                    f"at most {DEEPEST} levels deep"
                )
            if cure is not None:
                yield f"{key} cannot hold {option!r}: {cure}"


def _is_plain(value: Any, level: int = 0) -> bool:
    """Whether the value means the same in TOML and JSON (no dates, no nan, no infinity)."""
    if isinstance(value, dict):
        value = list(cast(dict[str, Any], value).values())
    if isinstance(value, list):
        entries = cast(list[Any], value)
        return level < DEEPEST and all(_is_plain(entry, level + 1) for entry in entries)
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _single_settings_of_losses(config: Config) -> Iterator[str]:
    loss, correction, advantage = config.loss, config.correction, config.advantage
    if isinstance(loss, Grpo) and 0 < loss.dual_clip <= 1:
        yield f"loss.dual_clip must be > 1, or 0 for none, got {loss.dual_clip}"
    if isinstance(correction, Masked | Icepop | GeometricMask) and correction.low > correction.high:
        yield (
            f"correction.low must be <= correction.high = {correction.high}, got {correction.low}: "
            "nothing would be kept"
        )
    if advantage.baseline == "leave_one_out" and advantage.std != "none":
        yield (
            "advantage.baseline = 'leave_one_out' needs advantage.std = 'none', got "
            f"{advantage.std!r}: divided by a deviation it would only be another scale of "
            "'group_mean'"
        )
    if advantage.overlong_buffer_tokens > config.rollout.max_response_tokens:
        yield (
            "advantage.overlong_buffer_tokens must be <= rollout.max_response_tokens = "
            f"{config.rollout.max_response_tokens}, got {advantage.overlong_buffer_tokens}"
        )


def _ratio_of_the_loss(config: Config) -> Iterator[str]:
    """Denominators that were not recorded, are not read, or are corrected for twice."""
    loss, correction, verification = config.loss, config.correction, config.verification
    if loss.name == "reinforce" and loss.denominator != "anchor_now":
        yield (
            f"loss.denominator = {loss.denominator!r} has no effect with loss.name = 'reinforce', "
            "which has no ratio; leave it at 'anchor_now'"
        )
    if loss.denominator == "behavior" and correction.name in RATIO_WEIGHTS:
        yield (
            f"loss.denominator = 'behavior' with correction.name = {correction.name!r} counts the "
            "gap to the engine twice: the ratio divides by its log-probs already; set "
            "correction.name = 'none'"
        )
    if loss.name == "decoupled_ppo" and correction.name in RATIO_WEIGHTS:
        yield (
            f"loss.name = 'decoupled_ppo' with correction.name = {correction.name!r} would weigh "
            "by denominator / behavior twice; set correction.name = 'none' (its own weight has "
            "loss.weight_cap)"
        )
    if loss.name == "decoupled_ppo" and loss.denominator == "behavior":
        yield (
            "loss.name = 'decoupled_ppo' needs a denominator apart from loss.denominator = "
            "'behavior', where its weight is always 1; set 'anchor_now' or loss.name = 'grpo'"
        )
    if loss.denominator != "anchor_at_sampling" or config.method.name == "on_policy":
        return  # With on_policy every token is fresh, and the policy before the step its anchor.
    is_scored = config.method.name == "rollverify" or config.filter.name == "ops"
    if verification.against != "anchor" or not (is_scored or verification.measure):
        yield (
            "loss.denominator = 'anchor_at_sampling' needs the anchors of stale tokens, which are "
            f"not recorded with verification.against = {verification.against!r} and "
            f"verification.measure = {str(verification.measure).lower()}; set "
            "verification.against = 'anchor' and verification.measure = true, or "
            "loss.denominator = 'behavior'"
        )


def _sequence_losses(config: Config) -> Iterator[str]:
    """What would take GSPO's ratio of the whole response apart again."""
    loss, correction = config.loss, config.correction
    if loss.name not in ("gspo", "gspo_token"):
        return
    if loss.aggregation != "sequence_mean":
        yield (
            f"loss.name = {loss.name!r} needs loss.aggregation = 'sequence_mean', got "
            f"{loss.aggregation!r}: its loss belongs to a response; others weigh it by length"
        )
    is_by_token = isinstance(correction, Truncated | Masked) and correction.level == "token"
    if is_by_token or correction.name in ("icepop", "mask_stale"):
        level = " with correction.level = 'token'" if is_by_token else ""
        yield (
            f"correction.name = {correction.name!r}{level} weighs single tokens, but loss.name = "
            f"{loss.name!r} has one ratio per response; set correction.level = 'sequence', or "
            "correction.name = 'geometric_mask' or 'none'"
        )


def _averages(config: Config) -> Iterator[str]:
    """Dr. GRPO without its average, and smaller averages, a pass each, where nothing is dropped."""
    loss, name, advantage = config.loss, config.correction.name, config.advantage
    is_whole = advantage.std == "none" and loss.aggregation == "constant_length"
    if loss.name == "dr_grpo" and not is_whole:
        yield (
            "loss.name = 'dr_grpo' needs advantage.std = 'none' and loss.aggregation = "
            f"'constant_length', got {advantage.std!r} and {loss.aggregation!r}: its token loss is "
            "that of 'grpo'"
        )
    drops = isinstance(loss, DecoupledPpo) and loss.cap_action == "mask"
    drops |= loss.name == "m2po" or name in MASKS or isinstance(loss, CustomLoss)
    if not loss.masked_in_denominator and not drops:
        yield (
            f"loss.masked_in_denominator = false has no effect with correction.name = {name!r} and "
            f"loss.name = {loss.name!r}, which drop no token; remove it, or set correction.name to "
            f"one of {', '.join(MASKS)}"
        )


def check_world_size(config: Config, world_size: int) -> int:
    """Number of data-parallel ranks, replicate * shard; each takes an equal share of prompts."""
    parallelism = config.parallelism
    replicate, tensor = parallelism.data_parallel_replicate, parallelism.tensor_parallel
    shard = parallelism.data_parallel_shard
    if shard == -1:
        shard = max(1, world_size // (replicate * tensor))
    ranks = f"{world_size} rank" if world_size == 1 else f"{world_size} ranks"
    needed = replicate * shard * tensor
    if needed != world_size:
        raise ConfigError(
            f"parallelism needs {needed} ranks (data_parallel_replicate {replicate} * "
            f"data_parallel_shard {shard} * tensor_parallel {tensor}) but {ranks} started; start "
            f"that many (NGPU={needed}) or change [parallelism]"
        )
    engine = config.engine.tensor_parallel
    if max(engine, tensor) % min(engine, tensor) or world_size % engine:
        raise ConfigError(
            f"engine.tensor_parallel = {engine} must divide the {ranks}, and divide or be a "
            f"multiple of parallelism.tensor_parallel = {tensor}"
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
