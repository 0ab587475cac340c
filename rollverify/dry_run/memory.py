"""Memory of one GPU by part, from the shapes of a model and the settings of a run.

Weights, gradients and optimizer follow from the layout; activations are an estimate. What
allocator, libraries or graphs take is not in it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollverify.config.tables import TrainingConfig

GIB = 2**30
FLOAT32 = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
LIVE_CHUNKS = 4
"""Tensors of one chunk of logits that live at the same time in the backward pass of the head."""

ENGINE_WORKSPACE_BYTES = GIB
"""Left to the engine beside weights and cache: activations of a decode step, buffers."""


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

    trainer: dict[str, int]
    """By part."""

    engine_weights: int
    engine_budget: int
    """Weights, workspace and cache."""

    kv_per_token: int
    device: int

    @property
    def cache(self) -> int:
        """Left for keys and values."""
        return max(0, self.engine_budget - self.engine_weights - ENGINE_WORKSPACE_BYTES)

    @property
    def total(self) -> int:
        """Trainer and engine."""
        return sum(self.trainer.values()) + self.engine_budget


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


def activation_bytes(
    sizes: Sizes, num_tokens: int, dtype: str, activation_checkpoint: str, tensor: int
) -> int:
    """Estimate of what the backward pass of a packed row of `num_tokens` needs, without the head.

    A layer keeps per token its two inputs and two normed inputs, queries and the attention's output
    twice, keys and values twice, and three inner widths; with experts also the copies of the token
    that are sent out and come back. Fully checkpointed, only a layer's input stays, and one layer
    is alive; selective lies between, counted as half. Tensor ranks divide heads and inner width.
    """
    heads = 3 * sizes.num_heads + 4 * sizes.num_kv_heads
    copies = 2 * sizes.experts_per_token * sizes.hidden_size
    divided = heads * sizes.head_dim + 3 * sizes.inner_size
    layer = num_tokens * (4 * sizes.hidden_size + copies + math.ceil(divided / tensor))
    inputs = num_tokens * sizes.hidden_size * sizes.num_layers
    values = {
        "none": layer * sizes.num_layers,
        "selective": inputs + (layer * sizes.num_layers) // 2,
        "full": inputs + layer,
    }[activation_checkpoint]
    return values * DTYPE_BYTES[dtype]


def trainer_bytes(
    parameters: Sequence[Parameter], sizes: Sizes, layout: Layout, training: TrainingConfig
) -> dict[str, int]:
    """Bytes of the trainer on the fullest rank, by part; tied weights are given once.

    Forward and backward are in the dtype of training; weights, gradients and optimizer in float32.
    """
    width = DTYPE_BYTES[training.dtype]
    mine = sum(owned(parameter, layout) for parameter in parameters)
    layer = largest_layer(parameters, layout)
    head = sizes.vocab_size * sizes.hidden_size
    is_gathered = layout.shard > 1 or training.dtype != "float32"
    gathered = 2 * layer + math.ceil(head / layout.tensor)
    return {
        "weights": FLOAT32 * mine,
        "gradients": FLOAT32 * mine,
        "optimizer": 2 * FLOAT32 * mine,
        "gathered layers": (width * gathered + FLOAT32 * layer) * is_gathered,
        "activations": activation_bytes(
            sizes,
            training.micro_batch_tokens,
            training.dtype,
            training.activation_checkpoint,
            layout.tensor,
        ),
        "log-prob head": LIVE_CHUNKS * training.logprob_chunk_mib * 2**20
        + (FLOAT32 + width) * head,
    }


def kv_bytes_per_token(sizes: Sizes, dtype: str) -> int:
    """Bytes of the engine's cache for one token: a key and a value in each layer."""
    return 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * DTYPE_BYTES[dtype]


def cures(
    training: TrainingConfig,
    *,
    num_layers: int,
    max_sequence_tokens: int,
    spare_cache: int,
    num_ranks: int,
    on_gpu: bool,
) -> list[str]:
    """What makes a plan smaller than it is with these settings, the least intrusive first.

    `spare_cache` are the bytes of the engine's cache beyond one response. Ranks on CPUs share the
    machine's memory; on GPUs each has its own.
    """
    found = []
    if on_gpu:
        found.append("more ranks")
    elif num_ranks > 1:  # Shards add up to the same; engines and activations become fewer.
        found.append("fewer ranks")
    # Recomputing saves nothing where the one layer that is alive is all.
    least = {"none": 1, "selective": 2, "full": num_layers}[training.activation_checkpoint]
    if num_layers > least:
        found.append("training.activation_checkpoint = 'full'")
    if training.micro_batch_tokens > max_sequence_tokens:
        found.append("a smaller training.micro_batch_tokens")
    else:
        found.append("shorter rollout.max_response_tokens with training.micro_batch_tokens")
    if spare_cache > 0:
        setting = "engine.gpu_memory_utilization" if on_gpu else "engine.kv_cache_gib"
        found.append(f"a smaller {setting}")
    return found


def problems(plan: Plan, max_sequence_tokens: int, cures: Sequence[str]) -> list[str]:
    """Where the plan does not fit, each in one line with its numbers and the cure.

    There is at least one cure for a plan that is too large.
    """
    found = []
    least = plan.kv_per_token * max_sequence_tokens
    if plan.cache < least:
        found.append(
            f"the engine's {plan.engine_budget / GIB:.1f} GiB hold "
            f"{plan.engine_weights / GIB:.1f} GiB of weights, but not 1 GiB of workspace and the "
            f"{least / GIB:.1f} GiB of cache of one response of {max_sequence_tokens} tokens; "
            "raise engine.gpu_memory_utilization (on CPU engine.kv_cache_gib) or shorten "
            "rollout.max_response_tokens"
        )
    if plan.total > plan.device:
        parts = ", ".join(cures[:-1]), cures[-1]
        largest = max(plan.trainer, key=lambda part: plan.trainer[part])
        found.append(
            f"{plan.total / GIB:.1f} GiB do not fit into {plan.device / GIB:.1f} GiB: trainer "
            f"{sum(plan.trainer.values()) / GIB:.1f} (most of it {largest}), engine "
            f"{plan.engine_budget / GIB:.1f}; use {' or '.join(filter(None, parts))}"
        )
    return found
