"""What follows from a plan: settings to paste, what does not fit, and what would help."""

import math
from collections.abc import Sequence

from rollverify.config.tables import Config
from rollverify.dry_run.gpus import GPUS_PER_NODE
from rollverify.dry_run.memory import GIB, Layout, Plan


def num_in_flight(config: Config, layout: Layout) -> int:
    """Responses that an engine is given at a time."""
    rollout = config.rollout
    batch = rollout.prompts_per_step * rollout.group_size
    times = 1.0 if config.method.name == "on_policy" else rollout.oversampling
    return math.ceil(times * batch / layout.num_engines)


def advised_num_seqs(config: Config, plan: Plan, layout: Layout) -> int:
    """All that are in flight, but no more than the cache holds at half of the full length."""
    half = config.rollout.max_sequence_tokens / 2
    return max(1, min(num_in_flight(config, layout), int(plan.cached_tokens / half)))


def advised_settings(config: Config, plan: Plan, layout: Layout) -> list[str]:
    """Lines of a TOML file that make the most of the memory planned."""
    lines = ["[engine]", f"max_num_seqs = {advised_num_seqs(config, plan, layout)}"]
    if plan.share:
        lines.append(f"gpu_memory_utilization = {math.floor(100 * plan.share) / 100:.2f}")
    return lines


def preemption_warning(config: Config, plan: Plan, layout: Layout) -> list[str]:
    """One line if responses will have to make room for others before they are finished."""
    running = min(num_in_flight(config, layout), config.engine.max_num_seqs)
    needed = running * config.rollout.max_sequence_tokens // 2
    if plan.cached_tokens >= needed:
        return []
    return [
        f"warning: {running} responses of half the full length are {needed:,} tokens, the cache "
        f"holds {plan.cached_tokens:,}: vLLM will preempt some and compute them again; lower "
        "engine.max_num_seqs"
    ]


def cures(config: Config, plan: Plan, layout: Layout, num_layers: int, phase: str) -> list[str]:
    """What makes a phase smaller than it is with these settings, the least intrusive first.

    Ranks on CPUs share the machine's memory, so that shards add up to the same; on GPUs each has
    its own.
    """
    training, engine, longest = config.training, config.engine, config.rollout.max_sequence_tokens
    on_gpu, parts = "rollout" in plan.phases, plan.phases[phase]
    has_rows = parts["activations"] > 0
    shorter = "" if training.micro_batch_tokens > longest else "rollout.max_response_tokens and "
    # Recomputing saves nothing where the one layer that is alive is all.
    least = {"none": 1, "selective": 2, "full": num_layers}[training.activation_checkpoint]
    has_moments = on_gpu and phase != "optimizer step" and parts["optimizer"] > 0
    spare = min(parts["engine cache"], plan.cache - plan.kv_per_token * longest)
    share = "engine.gpu_memory_utilization" if on_gpu else "engine.kv_cache_gib"
    members = 2 * layout.engine
    divides = layout.num_ranks % members == 0 and members <= GPUS_PER_NODE
    possible = [
        (has_moments, "training.offload_optimizer = true"),
        (on_gpu and not engine.sleep, "engine.sleep = true"),
        (divides and parts["engine weights"] > 0, f"engine.tensor_parallel = {members}"),
        (on_gpu, "more ranks"),
        (not on_gpu and layout.num_ranks > 1, "fewer ranks"),
        (has_rows and num_layers > least, "training.activation_checkpoint = 'full'"),
        (has_rows, f"a smaller {shorter}training.micro_batch_tokens"),
        (spare > 0, f"a smaller {share}"),
    ]
    return [cure for helps, cure in possible if helps]


def problems(config: Config, plan: Plan, layout: Layout, num_layers: int) -> list[str]:
    """Where the plan does not fit, each in one line with its numbers and the cures."""
    longest, found = config.rollout.max_sequence_tokens, list[str]()
    least = plan.kv_per_token * longest
    if plan.cache < least:
        cure = "raise engine.kv_cache_gib"
        if "rollout" in plan.phases:
            ways = [*cures(config, plan, layout, num_layers, "rollout"), "GPUs with more memory"]
            if config.engine.gpu_memory_utilization:
                ways.insert(0, "a larger engine.gpu_memory_utilization")
            cure = f"use {_either(ways)}"
        found.append(
            f"rollout: beside the engine's {plan.engine_needs / GIB:.1f} GiB of weights and "
            f"workspace there are {plan.cache / GIB:.1f} GiB of cache, but one response of "
            f"{longest} tokens takes {least / GIB:.1f}; {cure}, or shorten "
            "rollout.max_response_tokens"
        )
    for phase, parts in plan.phases.items():
        total = sum(parts.values())
        if total <= plan.device:
            continue
        largest = sorted(parts, key=lambda part: -parts[part])[:3]
        found.append(
            f"{phase}: {total / GIB:.1f} GiB do not fit into {plan.device / GIB:.1f} GiB (most of "
            f"it {', '.join(f'{part} {parts[part] / GIB:.1f}' for part in largest)}); use "
            f"{_either(cures(config, plan, layout, num_layers, phase))}"
        )
    return found


def _either(ways: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(ways[:-1]), ways[-1]]))
