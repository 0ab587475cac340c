"""Seconds of one step by phase, from counts of tokens, a model's shapes and a GPU's figures.

Each phase takes the longest of what memory bandwidth, arithmetic and the links between GPUs need.
The fractions below are what well-tuned kernels are commonly reported to reach, chosen before any
result was looked at. Not counted: rewards, Python beside the engine, waking an engine, offloaded
moments on their way, evaluation, and what tensor and expert ranks of the trainer exchange.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollverify.config.tables import Config
from rollverify.dry_run.gpus import GPUS_PER_NODE, Gpu
from rollverify.dry_run.memory import (
    DTYPE_BYTES,
    FLOAT32,
    Layout,
    Parameter,
    Sizes,
    engine_values,
    gathered_units,
    kv_bytes_per_token,
)
from rollverify.dry_run.work import Pass, Work

BANDWIDTH_FRAC = 0.8
"""Of a GPU's memory bandwidth: what long copies reach; kernels that only read come close to it."""
TRAIN_FRAC = 0.4
"""Of the GPU's flops in forward and backward of a dense model with recomputed activations."""
PREFILL_FRAC = 0.5
"""Of the flops in the engine's passes over long inputs and in decoding: no backward pass."""
EXPERT_FACTOR = 0.65
"""Of those two with experts: narrow products, and experts that get more tokens than others."""
NETWORK_FRAC = 0.7
"""Of a link's bandwidth in collectives of whole layers."""
ENGINE_STEP_S = 2e-3
"""Of a decode step beside reading and arithmetic: launches, sampling, scheduling."""
ALL_REDUCE_S = 1e-5
"""Of one sum over an engine's ranks beside its bytes; two a layer."""
STORAGE_PER_NODE = 2e9
"""Bytes per second that one machine writes to shared storage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A part of the step."""

    seconds: float
    limit: str
    """What it waits for: bandwidth, compute, network, overhead or storage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeStep:
    """One engine's step for `active` responses, in seconds by what takes them."""

    overhead: float
    """Of the engine, and of its sums over ranks whatever their size."""
    weights: float
    arithmetic: float
    """Of the products with weights, beside which these are read."""
    cache: float
    network: float

    @property
    def seconds(self) -> float:
        """Reading and arithmetic of the weights at the same time, the rest one after another."""
        return self.overhead + max(self.weights, self.arithmetic) + self.cache + self.network

    @property
    def fixed(self) -> float:
        """c0: what a step takes however few responses there are; of experts, with these."""
        return self.overhead + self.weights

    @property
    def limit(self) -> str:
        """The largest part."""
        parts = {
            "overhead": self.overhead,
            "bandwidth": self.cache + (self.weights if self.weights >= self.arithmetic else 0),
            "compute": self.arithmetic if self.arithmetic > self.weights else 0,
            "network": self.network,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The model on its ranks."""

    config: Config
    parameters: Sequence[Parameter]
    sizes: Sizes
    layout: Layout
    gpu: Gpu

    def is_looked_up(self, parameter: Parameter) -> bool:
        """Whether only rows of it are read: the embedding, where the head has its own weights."""
        is_embedding = parameter.name.startswith("tok_embeddings")
        return is_embedding and any(one.name.startswith("lm_head") for one in self.parameters)

    @property
    def num_experts(self) -> int:
        """Of a layer; 0 for a dense model."""
        return max((one.shape[0] for one in self.parameters if one.is_expert), default=0)

    @property
    def active_values(self) -> float:
        """Weights that one token is multiplied with."""
        share = self.sizes.experts_per_token / max(self.num_experts, 1)
        used = [one for one in self.parameters if not self.is_looked_up(one)]
        return sum(one.numel * (share if one.is_expert else 1) for one in used)

    def flops(self, work: Pass) -> float:
        """Of a forward pass: two for each weight, and four for each head value attended to."""
        sizes = self.sizes
        attention = 4 * sizes.num_layers * sizes.num_heads * sizes.head_dim
        return 2 * self.active_values * work.tokens + attention * work.attended

    def link(self, num_ranks: int) -> float:
        """Bytes per second between so many ranks that follow each other."""
        gpu = self.gpu
        return NETWORK_FRAC * (gpu.nvlink if num_ranks <= GPUS_PER_NODE else gpu.network)

    def arithmetic_s(self, flops: float, fraction: float) -> float:
        """Seconds of all ranks together."""
        fraction *= EXPERT_FACTOR if self.num_experts else 1
        return flops / (self.gpu.flops * fraction * self.layout.num_ranks)

    def decode_step(self, active: float, context: float) -> DecodeStep:
        """A step of one engine with so many responses that attend to so many tokens."""
        dtype, sizes, members = self.config.engine.dtype, self.sizes, self.layout.engine
        width = DTYPE_BYTES[dtype]
        bandwidth = BANDWIDTH_FRAC * self.gpu.memory_bandwidth
        # Experts that no token of the batch chose are not read.
        chosen = 1 - (1 - sizes.experts_per_token / max(self.num_experts, 1)) ** active
        values = sum(
            engine_values(one, sizes, members) * (chosen if one.is_expert else 1)
            for one in self.parameters
            if not self.is_looked_up(one)
        )
        one_token = self.flops(Pass(tokens=active))
        arithmetic = self.arithmetic_s(one_token, PREFILL_FRAC) * self.layout.num_ranks / members
        cached = kv_bytes_per_token(sizes, dtype, members) * context * active
        num_sums = 2 * sizes.num_layers if members > 1 else 0
        sent = 2 * (members - 1) / members * active * sizes.hidden_size * width
        return DecodeStep(
            overhead=ENGINE_STEP_S + num_sums * ALL_REDUCE_S,
            weights=width * values / bandwidth,
            arithmetic=arithmetic,
            cache=cached / bandwidth,
            network=num_sums * sent / self.link(members),
        )

    def gather_bytes(self, width: int) -> float:
        """Bytes that a rank receives when every layer is gathered once."""
        values = sum(gathered_units(self.parameters, self.layout).values())
        return width * values * (1 - 1 / self.layout.shard)

    def num_rows(self, tokens: float) -> int:
        """Rows of one data rank, on which it gathers every layer anew."""
        per_rank = tokens / (self.layout.replicate * self.layout.shard)
        return math.ceil(per_rank / self.config.training.micro_batch_tokens)

    def trainer_phase(self, work: Pass, passes: float, moved: float, after: float = 0.0) -> Phase:
        """Forward passes' worth of arithmetic beside `moved` bytes for every row, then `after`."""
        compute = self.arithmetic_s(passes * self.flops(work), TRAIN_FRAC)
        link = self.link(self.layout.shard * self.layout.tensor)
        network = self.num_rows(work.tokens) * moved / link + after
        limit = "compute" if compute >= network else "network"
        return Phase(seconds=max(compute, network), limit=limit)

    def scoring(self, work: Pass) -> Phase:
        """A forward pass of the trainer."""
        width = DTYPE_BYTES[self.config.training.dtype]
        return self.trainer_phase(work, 1, self.gather_bytes(width))

    def training(self, work: Pass) -> Phase:
        """Forward, backward and what is recomputed; sums of gradients over shards for every row.

        Copies of the model (HSDP) are summed once.
        """
        training, layout = self.config.training, self.layout
        recomputed = {"none": 0.0, "selective": 0.5, "full": 1.0}[training.activation_checkpoint]
        width = DTYPE_BYTES[training.dtype]
        moved = 2 * self.gather_bytes(width) + self.gather_bytes(FLOAT32)
        copies = (
            FLOAT32 * sum(one.numel for one in self.parameters) / (layout.shard * layout.tensor)
        )
        copies *= 2 * (layout.replicate - 1) / layout.replicate
        return self.trainer_phase(work, 3 + recomputed, moved, copies / self.link(layout.num_ranks))

    def weight_sync(self) -> Phase:
        """Every rank gathers the weights whole, cast to the engine's type."""
        ranks = self.layout.shard * self.layout.tensor
        values = sum(one.numel for one in self.parameters) * (1 - 1 / ranks)
        sent = DTYPE_BYTES[self.config.engine.dtype] * values
        return Phase(seconds=sent / self.link(ranks), limit="network")

    def checkpoint(self) -> Phase:
        """A step's share of writing weights and moments, unless that is done beside the steps."""
        settings = self.config.checkpoint
        if settings.in_background or not settings.every_steps:
            return Phase(seconds=0.0, limit="storage")
        written = 3 * FLOAT32 * sum(one.numel for one in self.parameters)
        # One of the copies writes.
        nodes = math.ceil(self.layout.shard * self.layout.tensor / GPUS_PER_NODE)
        seconds = written / (STORAGE_PER_NODE * nodes) / settings.every_steps
        return Phase(seconds=seconds, limit="storage")

    def timeline(self, work: Work) -> dict[str, Phase]:
        """The phases of a step that take any time, in their order."""
        config, step = self.config, self.decode_step(work.active, work.context)
        # Tensor ranks with an engine each do the same.
        twins = self.layout.num_ranks / (self.layout.num_engines * self.layout.engine)
        prefill = twins * self.arithmetic_s(self.flops(work.prefill), PREFILL_FRAC)
        phases = {
            "decode": Phase(seconds=work.decode_steps * step.seconds, limit=step.limit),
            "prefill": Phase(seconds=prefill, limit="compute"),
            "anchors": self.scoring(work.anchors),
            "training": self.training(work.training),
            "verification": self.scoring(work.verification),
            "weight sync": self.weight_sync(),
            "checkpoint": self.checkpoint(),
        }
        if config.training.minibatches > 1:
            phases["policy before"] = self.scoring(work.training)
        if config.kl.coefficient > 0:
            phases["KL scoring"] = self.scoring(work.training)
        return {name: phase for name, phase in phases.items() if phase.seconds > 0}
