"""Seconds of a step written down again from a config.json, sharing no code with the product.

Two layouts, each spelt out line by line: Qwen3-8B with an engine on every GPU and plain FSDP,
Qwen3-30B-A3B with engines of two GPUs and copies of 32 shards. GPUs are H100.
"""

from dataclasses import dataclass
from math import ceil

FLOPS, MEMORY, NVLINK, NETWORK = 989e12, 3.35e12 * 0.8, 450e9 * 0.7, 50e9 * 0.7


@dataclass(kw_only=True)
class Counts:
    """Of one step over all GPUs: tokens of a pass, and tokens attended to, summed over them."""

    steps: float
    active: float
    context: float
    prefill: tuple[float, float]
    anchors: tuple[float, float]
    training: tuple[float, float]
    verification: tuple[float, float]


def dense_8b_on_32(n: Counts) -> dict[str, float]:
    """Rows of 32,768 tokens, recomputed activations, a checkpoint every 20 steps."""
    head = 151_936 * 4096
    layer = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 12_288 * 4096 + 2 * 128 + 2 * 4096
    without_embedding = 36 * layer + 4096 + head
    weights = without_embedding + head
    attention = 4 * 36 * 32 * 128  # queries by keys and weights by values, two operations each

    def forward(work: tuple[float, float]) -> float:
        return 2 * without_embedding * work[0] + attention * work[1]

    def rows(work: tuple[float, float]) -> int:
        return ceil(work[0] / 32 / 32_768)

    received = weights * 31 / 32  # values, when all layers are gathered
    read = 2 * without_embedding / MEMORY
    multiplied = 2 * without_embedding * n.active / (FLOPS * 0.5)
    cached = n.active * n.context * 147_456 / MEMORY
    return {
        "decode": n.steps * (0.002 + max(read, multiplied) + cached),
        "prefill": forward(n.prefill) / (32 * FLOPS * 0.5),
        "anchors": max(
            forward(n.anchors) / (32 * FLOPS * 0.4), rows(n.anchors) * 2 * received / NETWORK
        ),
        # Gathered in bfloat16 for forward and backward; gradients in float32.
        "training": max(
            4 * forward(n.training) / (32 * FLOPS * 0.4),
            rows(n.training) * (2 + 2 + 4) * received / NETWORK,
        ),
        "verification": max(
            forward(n.verification) / (32 * FLOPS * 0.4),
            rows(n.verification) * 2 * received / NETWORK,
        ),
        "weight sync": 2 * received / NETWORK,
        "checkpoint": 12 * weights / (4 * 2e9) / 20,
    }


def experts_30b_on_1024(n: Counts) -> dict[str, float]:
    """32 copies of 32 shards, 512 engines of two GPUs; the rest as above."""
    head, expert = 151_936 * 2048, 3 * 768 * 2048
    attention_weights = 2 * 4096 * 2048 + 2 * 512 * 2048
    norms, router = 2 * 128 + 2 * 2048, 128 * 2048
    weights = 48 * (attention_weights + norms + router + 128 * expert) + 2048 + 2 * head
    active = 48 * (attention_weights + norms + router + 8 * expert) + 2048 + head
    attention = 4 * 48 * 32 * 128

    def forward(work: tuple[float, float]) -> float:
        return 2 * active * work[0] + attention * work[1]

    def rows(work: tuple[float, float]) -> int:
        return ceil(work[0] / 1024 / 32_768)

    received = weights * 31 / 32
    chosen = 1 - (120 / 128) ** n.active  # of the experts, by at least one token
    mine = 48 * (attention_weights / 2 + norms + router + 64 * expert * chosen) + 2048 + head / 2
    read = 2 * mine / MEMORY
    multiplied = 2 * active * n.active / (2 * FLOPS * 0.5 * 0.65)
    cached = n.active * n.context * 49_152 / MEMORY  # two of four key-value heads
    # Two sums a layer; of two members each sends as much as it has.
    sums = 2 * 48 * (1e-5 + n.active * 2048 * 2 / NVLINK)
    compute = 1024 * FLOPS * 0.65
    return {
        "decode": n.steps * (0.002 + max(read, multiplied) + cached + sums),
        "prefill": forward(n.prefill) / (compute * 0.5),
        "anchors": max(
            forward(n.anchors) / (compute * 0.4), rows(n.anchors) * 2 * received / NETWORK
        ),
        # And the shards' gradients over the 32 copies once, there and back.
        "training": max(
            4 * forward(n.training) / (compute * 0.4),
            (rows(n.training) * 8 * received + 2 * 4 * weights / 32 * 31 / 32) / NETWORK,
        ),
        "verification": max(
            forward(n.verification) / (compute * 0.4),
            rows(n.verification) * 2 * received / NETWORK,
        ),
        "weight sync": 2 * received / NETWORK,
        "checkpoint": 12 * weights / (4 * 2e9) / 20,
    }
