"""Memory of one GPU by part, from the shapes of a model and the settings of a run.

Weights, gradients and optimizer follow from the layout; activations are an estimate of what the
backward pass keeps. Plain arithmetic: does not measure, and does not know what allocator, libraries
or graphs take.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
        """Number of values."""
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
    for one in parameters:
        if one.name.startswith("layers."):
            index = one.name.split(".")[1]
            layers[index] = layers.get(index, 0) + one.numel
    return math.ceil(max(layers.values(), default=0) / layout.tensor)


def activation_bytes(
    sizes: Sizes, num_tokens: int, dtype: str, activation_checkpoint: str, tensor: int
) -> int:
    """Estimate of what the backward pass of one packed row needs, without the head.

    A layer keeps per token its two inputs and two normed inputs, queries and the attention's output
    twice, keys and values twice, and three inner widths; with experts also the copies of the token
    that are sent out and come back. Fully checkpointed, only a layer's input stays, and one layer
    is alive; selective lies between, counted as half.

    Args:
        sizes: of the model.
        num_tokens: of a row, `training.micro_batch_tokens`.
        dtype: of the activations.
        activation_checkpoint: "none", "selective" or "full".
        tensor: ranks that divide heads and inner width.
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
    parameters: list[Parameter],
    sizes: Sizes,
    layout: Layout,
    *,
    dtype: str,
    activation_checkpoint: str,
    num_tokens: int,
    chunk_mib: int,
) -> dict[str, int]:
    """Bytes of the trainer on the fullest rank, by part.

    Args:
        parameters: all weights, tied ones once.
        sizes: of the model.
        layout: over how many ranks they are divided.
        dtype: of forward and backward; weights, gradients and optimizer are float32.
        activation_checkpoint: "none", "selective" or "full".
        num_tokens: of a packed row.
        chunk_mib: of one chunk of logits, MiB.
    """
    mine = sum(owned(one, layout) for one in parameters)
    layer = largest_layer(parameters, layout)
    head = sizes.vocab_size * sizes.hidden_size
    is_gathered = layout.shard > 1 or dtype != "float32"
    gathered = 2 * layer + math.ceil(head / layout.tensor)
    return {
        "weights": FLOAT32 * mine,
        "gradients": FLOAT32 * mine,
        "optimizer": 2 * FLOAT32 * mine,
        "gathered layers": (DTYPE_BYTES[dtype] * gathered + FLOAT32 * layer) * is_gathered,
        "activations": activation_bytes(
            sizes, num_tokens, dtype, activation_checkpoint, layout.tensor
        ),
        "log-prob head": LIVE_CHUNKS * chunk_mib * 2**20 + (FLOAT32 + DTYPE_BYTES[dtype]) * head,
    }


def kv_bytes_per_token(sizes: Sizes, dtype: str) -> int:
    """Bytes of the engine's cache for one token: a key and a value in each layer."""
    return 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * DTYPE_BYTES[dtype]


def cures(
    *,
    activation_checkpoint: str,
    num_layers: int,
    micro_batch_tokens: int,
    max_sequence_tokens: int,
    spare_cache: int,
    num_ranks: int,
    on_gpu: bool,
) -> list[str]:
    """What makes a plan smaller than it is with these settings, the least intrusive first.

    Args:
        activation_checkpoint: "none", "selective" or "full".
        num_layers: of the model; recomputing saves nothing where the one that is alive is all.
        micro_batch_tokens: of a packed row.
        max_sequence_tokens: longest prompt plus response, which a row must hold.
        spare_cache: bytes of the engine's cache beyond one response.
        num_ranks: of the run.
        on_gpu: whether each rank has its own device; ranks on CPUs share the machine's memory.
    """
    found = []
    if on_gpu:
        found.append("more ranks")
    elif num_ranks > 1:  # Shards add up to the same; engines and activations become fewer.
        found.append("fewer ranks")
    if num_layers > {"none": 1, "selective": 2, "full": num_layers}[activation_checkpoint]:
        found.append("training.activation_checkpoint = 'full'")
    if micro_batch_tokens > max_sequence_tokens:
        found.append("a smaller training.micro_batch_tokens")
    else:
        found.append("shorter rollout.max_response_tokens with training.micro_batch_tokens")
    if spare_cache > 0:
        setting = "engine.gpu_memory_utilization" if on_gpu else "engine.kv_cache_gib"
        found.append(f"a smaller {setting}")
    return found


def problems(
    trainer: Mapping[str, int],
    *,
    engine_weights: int,
    engine_budget: int,
    kv_per_token: int,
    max_sequence_tokens: int,
    device_bytes: int,
    cures: Sequence[str],
) -> list[str]:
    """Where the plan does not fit, each in one line with its numbers and the cure.

    Args:
        trainer: bytes by part.
        engine_weights: bytes.
        engine_budget: bytes the engine may take, weights and cache together.
        kv_per_token: bytes.
        max_sequence_tokens: longest prompt plus response.
        device_bytes: memory of one device.
        cures: at least one, for a plan that is too large.
    """
    found = []
    cache = engine_budget - engine_weights - ENGINE_WORKSPACE_BYTES
    least = kv_per_token * max_sequence_tokens
    if cache < least:
        found.append(
            f"the engine's {engine_budget / GIB:.1f} GiB hold {engine_weights / GIB:.1f} GiB of "
            f"weights, but not 1 GiB of workspace and the {least / GIB:.1f} GiB of cache of one "
            f"response of {max_sequence_tokens} tokens; raise engine.gpu_memory_utilization (on "
            "CPU engine.kv_cache_gib) or shorten rollout.max_response_tokens"
        )
    total = sum(trainer.values()) + engine_budget
    if total > device_bytes:
        parts = ", ".join(cures[:-1]), cures[-1]
        largest = max(trainer, key=lambda part: trainer[part])
        found.append(
            f"{total / GIB:.1f} GiB do not fit into {device_bytes / GIB:.1f} GiB: trainer "
            f"{sum(trainer.values()) / GIB:.1f} (most of it {largest}), engine "
            f"{engine_budget / GIB:.1f}; use {' or '.join(filter(None, parts))}"
        )
    return found
