"""Memory of one GPU in each phase, by part, from the shapes of a model and the settings of a run.

Weights, gradients, optimizer and cache follow from the layout. Activations are an estimate, and
`Allowances` are guesses from other people's reports until a GPU run replaces them.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollverify.config.tables import Config, TrainingConfig
from rollverify.engine.memory import engine_share

GIB = 2**30
FLOAT32 = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
LIVE_CHUNKS = 4
"""Tensors of one chunk of logits that live at the same time in the backward pass of the head."""

TRAINER = ("training", "optimizer step")
"""Phases in which the engine may be asleep."""

CPU_WORKSPACE = GIB
"""Left to an engine on CPUs beside weights and cache."""


class Allowances:
    """What no shape tells, bytes; not measured by this project."""

    CONTEXT = GIB
    """CUDA context, kernels and libraries of one process."""
    COMMUNICATION = 3 * GIB // 2
    """Buffers of NCCL, with more than one rank."""
    GRAPHS = GIB
    """CUDA graphs of the engine; they stay while it sleeps."""
    FRAGMENTATION = 0.04
    """Of what a phase allocates, with expandable segments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One weight before it is sharded."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Values in it."""
        return math.prod(self.shape)

    @property
    def is_expert(self) -> bool:
        """Whether it holds the stacked weights of a layer's experts."""
        return ".experts." in self.name or ".inner_experts." in self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Over how many ranks what is divided."""

    shard: int
    tensor: int
    num_ranks: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What the activations and the key-value cache of a model depend on."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    inner_size: int
    """Width of the feed-forward part that one token passes: with experts, all of the token's."""

    experts_per_token: int = 0
    """0 for a dense model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Bytes of one device."""

    phases: dict[str, dict[str, int]]
    """Parts of each phase by name; on CPUs there is one phase."""

    engine_weights: int
    cache: int
    """Keys and values, 0 or more."""

    kv_per_token: int
    device: int

    @property
    def cached_tokens(self) -> int:
        """Tokens that the cache holds."""
        return self.cache // self.kv_per_token


def owned(parameter: Parameter, layout: Layout) -> int:
    """Values of a parameter on the rank that has most of them.

    Rows are divided over the sharding ranks and rounded up; a matrix is divided over the tensor
    ranks first, experts over both alike.
    """
    if parameter.is_expert:
        return math.ceil(parameter.numel / (layout.shard * layout.tensor))
    rows = math.ceil(parameter.shape[0] / layout.shard)
    values = rows * math.prod(parameter.shape[1:])
    return values if len(parameter.shape) == 1 else math.ceil(values / layout.tensor)


def largest_layer(parameters: Iterable[Parameter], layout: Layout) -> int:
    """Values of the largest layer as it is gathered for its forward pass."""
    layers: dict[str, int] = {}
    for parameter in parameters:
        if parameter.name.startswith("layers."):
            index = parameter.name.split(".")[1]
            layers[index] = layers.get(index, 0) + parameter.numel
    return math.ceil(max(layers.values(), default=0) / layout.tensor)


def layer_values(sizes: Sizes, num_tokens: int, tensor: int) -> int:
    """Values that one layer keeps of a row of `num_tokens` for its backward pass; an estimate.

    Per token its two inputs and two normed inputs, queries and the attention's output twice, keys
    and values twice, and three inner widths; with experts also the copies of the token that are
    sent out and come back. Tensor ranks divide heads and inner width.
    """
    heads = 3 * sizes.num_heads + 4 * sizes.num_kv_heads
    copies = 2 * sizes.experts_per_token * sizes.hidden_size
    divided = heads * sizes.head_dim + 3 * sizes.inner_size
    return num_tokens * (4 * sizes.hidden_size + copies + math.ceil(divided / tensor))


def activation_bytes(
    sizes: Sizes, num_tokens: int, dtype: str, activation_checkpoint: str, tensor: int
) -> int:
    """What the backward pass of a packed row of `num_tokens` needs, without the head.

    Fully checkpointed, only a layer's input stays, and one layer is alive; selective lies between,
    counted as half.
    """
    layer = layer_values(sizes, num_tokens, tensor)
    inputs = num_tokens * sizes.hidden_size * sizes.num_layers
    values = {
        "none": layer * sizes.num_layers,
        "selective": inputs + (layer * sizes.num_layers) // 2,
        "full": inputs + layer,
    }[activation_checkpoint]
    return values * DTYPE_BYTES[dtype]


def resident_bytes(parameters: Sequence[Parameter], layout: Layout) -> dict[str, int]:
    """Weights and AdamW's two moments on the fullest rank, float32; tied weights once."""
    mine = FLOAT32 * sum(owned(parameter, layout) for parameter in parameters)
    return {"weights": mine, "optimizer": 2 * mine}


def step_bytes(
    parameters: Sequence[Parameter], sizes: Sizes, layout: Layout, training: TrainingConfig
) -> dict[str, int]:
    """What training and scoring need beside weights and optimizer, by part.

    Forward and backward are in the dtype of training, gradients and their sums in float32.
    """
    width, tensor = DTYPE_BYTES[training.dtype], layout.tensor
    layer = largest_layer(parameters, layout)
    head = sizes.vocab_size * sizes.hidden_size
    is_gathered = layout.shard > 1 or training.dtype != "float32"
    gathered = 2 * layer + math.ceil(head / tensor)
    num_tokens = training.micro_batch_tokens
    chunk_mib = training.logprob_chunk_mib or 512
    kept = activation_bytes(
        sizes, num_tokens, training.dtype, training.activation_checkpoint, tensor
    )
    return {
        "gradients": resident_bytes(parameters, layout)["weights"],
        "gathered layers": width * gathered * is_gathered,
        # Of the largest unit, before its gradient is summed over the ranks.
        "gradient sums": FLOAT32 * max(layer, math.ceil(head / tensor)) * is_gathered,
        "activations": kept,
        "backward of a layer": width * layer_values(sizes, num_tokens, tensor),
        "log-prob head": LIVE_CHUNKS * chunk_mib * 2**20 + (FLOAT32 + width) * head,
    }


def engine_workspace(sizes: Sizes, config: Config) -> int:
    """Activations of the longest engine step, and float32 logits and their softmax."""
    engine = config.engine
    layer = layer_values(sizes, engine.max_num_batched_tokens, 1) * DTYPE_BYTES[engine.dtype]
    return layer + 2 * FLOAT32 * engine.max_num_seqs * sizes.vocab_size


def kv_bytes_per_token(sizes: Sizes, dtype: str) -> int:
    """Bytes of the engine's cache for one token: a key and a value in each layer."""
    return 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * DTYPE_BYTES[dtype]


def plan_gpu(
    config: Config, parameters: Sequence[Parameter], sizes: Sizes, layout: Layout, device: int
) -> Plan:
    """The phases on a GPU of `device` bytes: decoding, transfer of weights, training, optimizer.

    With engine.sleep the engine's weights and cache are gone while the trainer works; with
    training.offload_optimizer the moments are there in the optimizer's own step alone.
    """
    engine, training = config.engine, config.training
    resident = resident_bytes(parameters, layout)
    reference = resident["weights"] if config.kl.coefficient > 0 else 0
    awake = {"weights": resident["weights"], "reference": reference}
    awake["optimizer"] = 0 if training.offload_optimizer else resident["optimizer"]
    always = {
        "context": Allowances.CONTEXT,
        "communication": Allowances.COMMUNICATION if layout.num_ranks > 1 else 0,
        "graphs": 0 if engine.compile == "off" else Allowances.GRAPHS,
    }
    weights = DTYPE_BYTES[engine.dtype] * sum(parameter.numel for parameter in parameters)
    workspace = engine_workspace(sizes, config)
    taken = sum(awake.values()) + always["context"] + always["communication"]
    share = engine.gpu_memory_utilization or engine_share(device - taken, device, engine.sleep)
    cache = max(0, int(share * device) - weights - workspace)
    decoding = {"engine weights": weights, "engine cache": cache, "engine workspace": workspace}
    largest = max(parameter.numel for parameter in parameters)
    gathered = (FLOAT32 + DTYPE_BYTES[engine.dtype]) * largest
    sync_cache = 0 if engine.sleep else cache
    in_training = {} if engine.sleep else decoding
    phases = {
        "decoding": awake | decoding,
        "weight sync": awake
        | {"engine weights": weights, "engine cache": sync_cache, "one parameter": gathered},
        "training": awake | step_bytes(parameters, sizes, layout, training) | in_training,
        "optimizer step": awake
        | {"optimizer": resident["optimizer"], "gradients": resident["weights"]}
        | in_training,
    }
    for parts in phases.values():
        allocated = sum(parts.values())
        parts |= always | {"fragmentation": int(Allowances.FRAGMENTATION * allocated)}
    kv = kv_bytes_per_token(sizes, engine.dtype)
    return Plan(phases=phases, engine_weights=weights, cache=cache, kv_per_token=kv, device=device)


def plan_cpu(
    config: Config, parameters: Sequence[Parameter], sizes: Sizes, layout: Layout, device: int
) -> Plan:
    """Everything at once, on this rank's part of the machine's memory."""
    engine = config.engine
    cache = int(engine.kv_cache_gib * GIB)
    weights = DTYPE_BYTES[engine.dtype] * sum(parameter.numel for parameter in parameters)
    parts = resident_bytes(parameters, layout)
    if config.kl.coefficient > 0:
        parts["reference"] = parts["weights"]
    training = config.training.model_copy(
        update={"logprob_chunk_mib": config.training.logprob_chunk_mib or 64}
    )
    parts |= step_bytes(parameters, sizes, layout, training)
    parts |= {
        "engine weights": weights,
        "engine cache": cache,
        "engine workspace": CPU_WORKSPACE,
    }
    kv = kv_bytes_per_token(sizes, engine.dtype)
    return Plan(
        phases={"at once": parts},
        engine_weights=weights,
        cache=cache,
        kv_per_token=kv,
        device=device,
    )


def cures(
    config: Config, *, num_layers: int, num_ranks: int, on_gpu: bool, phase: str
) -> list[str]:
    """What makes a phase smaller than it is with these settings, the least intrusive first.

    Ranks on CPUs share the machine's memory; on GPUs each has its own.
    """
    training, longest = config.training, config.rollout.max_sequence_tokens
    found = []
    if on_gpu and phase != "optimizer step" and not training.offload_optimizer:
        found.append("training.offload_optimizer = true")
    if on_gpu and not config.engine.sleep:
        found.append("engine.sleep = true")
    if on_gpu:
        found.append("more ranks")
    elif num_ranks > 1:  # Shards add up to the same; engines and activations become fewer.
        found.append("fewer ranks")
    if phase in ("training", "at once"):
        # Recomputing saves nothing where the one layer that is alive is all.
        least = {"none": 1, "selective": 2, "full": num_layers}[training.activation_checkpoint]
        if num_layers > least:
            found.append("training.activation_checkpoint = 'full'")
        if training.micro_batch_tokens > longest:
            found.append("a smaller training.micro_batch_tokens")
        else:
            found.append("shorter rollout.max_response_tokens with training.micro_batch_tokens")
    if not on_gpu:
        found.append("a smaller engine.kv_cache_gib")
    elif config.engine.gpu_memory_utilization and not (config.engine.sleep and phase in TRAINER):
        found.append("a smaller engine.gpu_memory_utilization")
    return found


def problems(
    plan: Plan, config: Config, *, num_layers: int, num_ranks: int, on_gpu: bool
) -> list[str]:
    """Where the plan does not fit, each in one line with its numbers and the cures."""
    found = []
    longest = config.rollout.max_sequence_tokens
    least = plan.kv_per_token * longest
    if plan.cache < least:
        cure = "engine.gpu_memory_utilization" if on_gpu else "engine.kv_cache_gib"
        found.append(
            f"beside {plan.engine_weights / GIB:.1f} GiB of weights the engine has "
            f"{plan.cache / GIB:.1f} GiB of cache, one response of {longest} tokens needs "
            f"{least / GIB:.1f}; raise {cure}, or shorten rollout.max_response_tokens"
        )
    for phase, parts in plan.phases.items():
        total = sum(parts.values())
        if total > plan.device:
            largest = sorted(parts, key=lambda part: -parts[part])[:2]
            sizes = ", ".join(f"{part} {parts[part] / GIB:.1f}" for part in largest)
            help_with = cures(
                config, num_layers=num_layers, num_ranks=num_ranks, on_gpu=on_gpu, phase=phase
            )
            found.append(
                f"{phase}: {total / GIB:.1f} GiB do not fit into {plan.device / GIB:.1f} GiB (most "
                f"of it {sizes}); use {', '.join(help_with[:-1])}{' or ' * (len(help_with) > 1)}"
                f"{help_with[-1]}"
            )
    return found
