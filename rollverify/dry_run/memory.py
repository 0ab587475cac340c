"""Memory of one device in each phase, by part, from a model's shapes and a run's settings.

Weights, gradients, optimizer and cache follow from the layout; what a layer keeps is counted on
torch's own graph (`tests/ext/test_layer_memory.py`). `Allowances` are estimates that no GPU has
confirmed, so a plan without room to spare is no promise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollverify.config.tables import Config, TrainingConfig
from rollverify.engine.memory import GIB, engine_share

FLOAT32 = 4
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
LIVE_CHUNKS = 4
"""Tensors of one chunk of logits that live at the same time in the backward pass of the head."""


class Allowances:
    """What no shape tells, in bytes: estimates, to be replaced by what a GPU run measures."""

    CONTEXT = GIB
    """CUDA context, kernels and libraries of a process; on CPUs its libraries."""
    COMMUNICATION = 3 * GIB // 2
    """Buffers of NCCL, with more than one rank."""
    GRAPHS = GIB
    """CUDA graphs of the engine, which stay while it sleeps."""
    FRAGMENTATION = 0.03
    """Of what a phase allocates, with the expandable segments that are set for every run."""


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

    @property
    def is_key_or_value(self) -> bool:
        """Whether it projects to keys or values."""
        return self.name.endswith((".wk.weight", ".wv.weight"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Over how many ranks what is divided."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    expert: int = 1
    engine: int = 1
    """Ranks that hold one engine together."""

    @property
    def num_engines(self) -> int:
        """Engines with responses of their own, which tensor ranks share."""
        return self.num_ranks // max(self.engine, self.tensor)

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.replicate * self.shard * self.tensor


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
    """Bytes of the fullest device."""

    phases: dict[str, dict[str, int]]
    """Parts of each phase by name; on CPUs all is there at once."""

    device: int
    cache: int
    """Keys and values, 0 or more."""

    kv_per_token: int
    engine_needs: int
    """Of the engine beside the cache."""

    share: float
    """Largest share of a GPU that the engine can take while every phase fits; 0 on CPUs."""

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


def gathered_units(parameters: Sequence[Parameter], layout: Layout) -> dict[str, int]:
    """Values of what FSDP gathers at a time: each layer, the embedding, the head with the norm.

    A tied embedding is part of the head. Tensor ranks divide matrices, expert ranks experts.
    """
    is_tied = not any(parameter.name.startswith("lm_head") for parameter in parameters)
    units: dict[str, int] = {"head": 0}
    for parameter in parameters:
        first, second = parameter.name.split(".")[:2]
        unit = f"layer {second}" if first == "layers" else "head"
        if first == "tok_embeddings" and not is_tied:
            unit = "embedding"
        parts = max(layout.tensor, layout.expert) if parameter.is_expert else layout.tensor
        values = math.ceil(parameter.numel / (parts if len(parameter.shape) > 1 else 1))
        units[unit] = units.get(unit, 0) + values
    return units


def layer_values(sizes: Sizes, tensor: int) -> tuple[int, int]:
    """Values per token that a layer keeps for its backward pass, and that it adds there at most.

    Kept are inputs and normed inputs of its two halves, queries before and after their norm and the
    attention's output, keys likewise and values, and four inner widths; of experts also the copies
    of the token that go out, and come back in float32. Tensor ranks divide heads and inner width.
    """
    hidden, copies = sizes.hidden_size, sizes.experts_per_token * sizes.hidden_size
    inner = math.ceil(sizes.inner_size / tensor)
    heads = math.ceil((sizes.num_heads + sizes.num_kv_heads) * sizes.head_dim / tensor)
    kept = 4 * hidden + 3 * heads + 4 * inner + 3 * copies
    return kept, hidden + (6 * copies or 2 * inner)


def kept_values(sizes: Sizes, activation_checkpoint: str, tensor: int) -> int:
    """Values per token that wait for the backward pass while one layer is alive, head included.

    Fully checkpointed, only a layer's input stays; selective lies between, counted as half.
    """
    layer, _ = layer_values(sizes, tensor)
    inputs = sizes.hidden_size * sizes.num_layers
    ends = 3 * sizes.hidden_size  # the last layer's output, the same normed, its gradient
    return (
        ends
        + {
            "none": layer * sizes.num_layers,
            "selective": inputs + layer * sizes.num_layers // 2,
            "full": inputs + layer,
        }[activation_checkpoint]
    )


def step_bytes(
    parameters: Sequence[Parameter],
    sizes: Sizes,
    layout: Layout,
    training: TrainingConfig,
    default_chunk_mib: int,
) -> dict[str, int]:
    """What training and scoring need beside weights, gradients and optimizer, by part.

    Parts of different moments of a backward pass are added up. It runs in the dtype of training,
    sums of gradients in float32.
    """
    width, tokens = DTYPE_BYTES[training.dtype], training.micro_batch_tokens
    units = gathered_units(parameters, layout)
    layer = max((values for name, values in units.items() if "layer" in name), default=0)
    head = sizes.vocab_size * sizes.hidden_size
    is_gathered = layout.shard > 1 or training.dtype != "float32"
    chunk_mib = training.logprob_chunk_mib or default_chunk_mib
    # Of the head: its gradient in float32 and again, and the weight that tensor ranks gather.
    weights_of_head = FLOAT32 + width * (2 if layout.tensor > 1 else 1)
    kept = kept_values(sizes, training.activation_checkpoint, layout.tensor)
    return {
        # A layer, the next one, and the head, which stays.
        "gathered weights": width * (2 * layer + units["head"]) * is_gathered,
        # A layer's own, and those of the largest unit on their way to the other ranks.
        "gradients in transit": (width * layer + FLOAT32 * max(units.values())) * is_gathered,
        "activations": width * tokens * kept,
        "backward of a layer": width * tokens * layer_values(sizes, layout.tensor)[1],
        "log-prob head": LIVE_CHUNKS * chunk_mib * 2**20 + weights_of_head * head,
    }


def engine_values(parameter: Parameter, sizes: Sizes, members: int) -> int:
    """Values of a parameter on one of an engine's `members` ranks.

    vLLM divides attention and feed-forward parts by heads and inner width, embedding and head by
    vocabulary. Norms and routers are whole on each, and so is a key-value head with more members
    than heads.
    """
    if len(parameter.shape) == 1 or ".router." in parameter.name:
        return parameter.numel
    parts = min(members, sizes.num_kv_heads) if parameter.is_key_or_value else members
    return math.ceil(parameter.numel / parts)


def engine_bytes(
    parameters: Sequence[Parameter], sizes: Sizes, config: Config, num_tokens: int
) -> dict[str, int]:
    """Weights, and the peak of a step, which vLLM measures at its start and takes off the cache.

    That is one layer's activations of `num_tokens`, and logits and log-probs of all sequences, of
    which every member of an engine has the whole vocabulary.
    """
    width, members = DTYPE_BYTES[config.engine.dtype], config.engine.tensor_parallel
    copies = sizes.experts_per_token * sizes.hidden_size
    inner = math.ceil(sizes.inner_size / members)
    layer = width * num_tokens * (2 * sizes.hidden_size + 3 * inner + copies)
    logits = 2 * FLOAT32 * config.engine.max_num_seqs * sizes.vocab_size
    weights = width * sum(engine_values(one, sizes, members) for one in parameters)
    return {"engine weights": weights, "engine workspace": layer + logits}


def kv_bytes_per_token(sizes: Sizes, dtype: str, members: int) -> int:
    """Bytes of one token in a member's cache: a key and a value in each layer, of its heads."""
    heads = math.ceil(sizes.num_kv_heads / members)
    return 2 * sizes.num_layers * heads * sizes.head_dim * DTYPE_BYTES[dtype]


def plan_cpu(
    config: Config, parameters: Sequence[Parameter], sizes: Sizes, layout: Layout, device: int
) -> Plan:
    """Everything at once, in this rank's part of the machine's memory."""
    engine = config.engine
    mine = FLOAT32 * sum(owned(parameter, layout) for parameter in parameters)
    cache = int(engine.kv_cache_gib * GIB)
    num_tokens = max(engine.max_num_batched_tokens, config.rollout.max_sequence_tokens)
    # Its own weights, and the policy's while it lends its model.
    reference = 2 * mine if config.kl.coefficient > 0 else 0
    trainer = {"weights": mine, "gradients": mine, "optimizer": 2 * mine, "reference": reference}
    held = engine_bytes(parameters, sizes, config, num_tokens)
    parts = trainer | step_bytes(parameters, sizes, layout, config.training, 64) | held
    parts |= {"engine cache": cache, "libraries": Allowances.CONTEXT}
    return Plan(
        phases={"at once": parts},
        device=device,
        cache=cache,
        kv_per_token=kv_bytes_per_token(sizes, engine.dtype, engine.tensor_parallel),
        engine_needs=sum(held.values()),
        share=0.0,
    )


def plan_gpu(
    config: Config, parameters: Sequence[Parameter], sizes: Sizes, layout: Layout, device: int
) -> Plan:
    """The phases of a step on a GPU of `device` bytes, in their order.

    With engine.sleep the engine's weights and cache are gone while the trainer works; with
    training.offload_optimizer the moments are there in the optimizer's own step alone. A KL term's
    reference waits in main memory.
    """
    engine, training = config.engine, config.training
    mine = FLOAT32 * sum(owned(parameter, layout) for parameter in parameters)
    step = step_bytes(parameters, sizes, layout, training, 512)
    waiting = {"weights": mine, "optimizer": 0 if training.offload_optimizer else 2 * mine}
    always = {
        "context": Allowances.CONTEXT,
        "communication": Allowances.COMMUNICATION if layout.num_ranks > 1 else 0,
        "graphs": Allowances.GRAPHS if engine.compile != "off" else 0,
    }
    held = engine_bytes(parameters, sizes, config, engine.max_num_batched_tokens)
    needs = sum(held.values()) + always["graphs"]
    free = device - sum(waiting.values()) - always["context"] - always["communication"]
    share = engine_share(free, device, engine.sleep)
    cache = max(0, int((engine.gpu_memory_utilization or share) * device) - needs)
    decoding = held | {"engine cache": cache}
    beside, awake = {}, {"engine weights": held["engine weights"]}
    if not engine.sleep:
        beside = awake = decoding
    largest = max(parameters, key=lambda one: one.numel)
    # Cast to the engine's type, as the ranks hand it over, and whole.
    num_sent = largest.numel * (2 if layout.num_ranks > 1 else 0) + owned(largest, layout)
    phases = {
        # The probe after a sync gathers the trainer's weights; those of the head stay.
        "rollout": waiting | {"gathered weights": step["gathered weights"]} | decoding,
        "training": waiting | {"gradients": mine} | step | beside,
        "optimizer step": waiting | {"gradients": mine, "optimizer": 2 * mine} | beside,
        "weight sync": waiting | {"parameter sent": DTYPE_BYTES[engine.dtype] * num_sent} | awake,
    }
    names = [*waiting, "gradients", *step, "parameter sent", *decoding, *always]
    for phase, parts in phases.items():
        lost = int(Allowances.FRAGMENTATION * sum(parts.values()))
        phases[phase] = {name: (parts | always).get(name, 0) for name in names}
        phases[phase]["fragmentation"] = lost
    if not engine.sleep:  # As much as the phase that needs most beside the engine leaves.
        own = max(sum(p.values()) - (1 + Allowances.FRAGMENTATION) * cache for p in phases.values())
        share = needs / device + (device - own) / (1 + Allowances.FRAGMENTATION) / device
    return Plan(
        phases=phases,
        device=device,
        cache=cache,
        kv_per_token=kv_bytes_per_token(sizes, engine.dtype, engine.tensor_parallel),
        engine_needs=needs,
        share=max(0.0, min(1.0, share)),
    )
