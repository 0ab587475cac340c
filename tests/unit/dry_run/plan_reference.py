"""The plan written down again from a Qwen3 config.json, sharing no code with the product.

`plan(...)` takes the contents of the file and numbers, and gives bytes by phase and part. Layers
are spelt out weight by weight, each part is one line of arithmetic.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

GIB = 1024**3


@dataclass(kw_only=True)
class Job:
    """Settings under the product's names, and the GPU."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    expert: int = 1
    engine: int = 1
    gib: int = 80
    micro_batch_tokens: int = 16384
    logprob_chunk_mib: int = 0
    activation_checkpoint: str = "full"
    offload_optimizer: bool = False
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.0
    sleep: bool = True
    compile: str = "auto"


def shapes(m: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every weight of the model under torchtitan's names; a tied head is none of its own."""
    d, h = m["hidden_size"], m["head_dim"]
    q, kv = m["num_attention_heads"] * h, m["num_key_value_heads"] * h
    found: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (m["vocab_size"], d)}
    for i in range(m["num_hidden_layers"]):
        at = f"layers.{i}"
        found[f"{at}.attention_norm.weight"] = found[f"{at}.ffn_norm.weight"] = (d,)
        found[f"{at}.attention.qkv_linear.wq.weight"] = (q, d)
        found[f"{at}.attention.qkv_linear.wk.weight"] = (kv, d)
        found[f"{at}.attention.qkv_linear.wv.weight"] = (kv, d)
        found[f"{at}.attention.q_norm.weight"] = found[f"{at}.attention.k_norm.weight"] = (h,)
        found[f"{at}.attention.wo.weight"] = (d, q)
        if "num_experts" in m:
            e, f = m["num_experts"], m["moe_intermediate_size"]
            found[f"{at}.moe.router.gate.weight"] = (e, d)
            inner = f"{at}.moe.routed_experts.inner_experts"
            found[f"{inner}.w1_EFD"] = found[f"{inner}.w3_EFD"] = (e, f, d)
            found[f"{inner}.w2_EDF"] = (e, d, f)
        else:
            f = m["intermediate_size"]
            found[f"{at}.feed_forward.w1.weight"] = found[f"{at}.feed_forward.w3.weight"] = (f, d)
            found[f"{at}.feed_forward.w2.weight"] = (d, f)
    found["norm.weight"] = (d,)
    if not m["tie_word_embeddings"]:
        found["lm_head.weight"] = (m["vocab_size"], d)
    return found


def size(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


def on_fullest_rank(shape: tuple[int, ...], job: Job) -> int:
    """Rows, rounded up, of the tensor rank's part; experts are stacked in three dimensions."""
    if len(shape) == 3:
        return ceil(size(shape) / (job.shard * job.tensor))
    if len(shape) == 1:
        return ceil(shape[0] / job.shard)
    return ceil(ceil(shape[0] / job.shard) * shape[1] / job.tensor)


def gathered(shape: tuple[int, ...], job: Job) -> int:
    if len(shape) == 1:
        return shape[0]
    return ceil(size(shape) / (job.expert if len(shape) == 3 and job.expert > 1 else job.tensor))


def engine_values(m: dict[str, Any], members: int) -> int:
    """Weights of one of an engine's members, written down by what vLLM puts into each layer."""
    d, h = m["hidden_size"], m["head_dim"]
    heads, kv = m["num_attention_heads"] // members, max(1, m["num_key_value_heads"] // members)
    layer = 2 * d + 2 * h + 2 * heads * h * d + 2 * kv * h * d
    if "num_experts" in m:
        experts = m["num_experts"]
        layer += experts * d + experts * 3 * d * (m["moe_intermediate_size"] // members)
    else:
        layer += 3 * d * (m["intermediate_size"] // members)
    ends = 1 if m["tie_word_embeddings"] else 2
    return ends * (m["vocab_size"] // members) * d + m["num_hidden_layers"] * layer + d


def per_token(m: dict[str, Any], tensor: int, engine: int = 1) -> tuple[int, int, int]:
    """Values of a layer: kept, added in its backward pass, and of an engine's forward pass."""
    d, heads = m["hidden_size"], m["num_attention_heads"] + m["num_key_value_heads"]
    k = m["num_experts_per_tok"] if "num_experts" in m else 0
    f = k * m["moe_intermediate_size"] if k else m["intermediate_size"]
    attention, inner = ceil(heads * m["head_dim"] / tensor), ceil(f / tensor)
    kept = 4 * d + 3 * attention + 4 * inner + 3 * k * d
    forward = 2 * d + 3 * ceil(f / engine) + k * d
    return kept, d + (6 * k * d if k else 2 * inner), forward


def training_step(m: dict[str, Any], job: Job) -> dict[str, int]:
    """What training in bfloat16 has beside weights, gradients and optimizer."""
    d, layers, row = m["hidden_size"], m["num_hidden_layers"], job.micro_batch_tokens
    all_shapes, head = shapes(m), m["vocab_size"] * d
    layer = sum(gathered(s, job) for name, s in all_shapes.items() if name.startswith("layers.0."))
    head_unit = gathered((m["vocab_size"], d), job) + d  # with the last norm
    is_gathered = 1  # bfloat16 copies, on one rank too
    kept, more, _ = per_token(m, job.tensor)
    waiting = {
        "none": layers * kept,
        "selective": layers * d + layers * kept // 2,
        "full": layers * d + kept,
    }[job.activation_checkpoint]
    chunks = 4 * (job.logprob_chunk_mib or 512) * 1024**2
    return {
        "gathered weights": 2 * (2 * layer + head_unit) * is_gathered,
        "gradients in transit": 2 * layer + 4 * max(layer, head_unit),
        "activations": 2 * row * (waiting + 3 * d),
        "backward of a layer": 2 * row * more,
        "log-prob head": chunks + 4 * head + 2 * head + (2 * head if job.tensor > 1 else 0),
    }


def plan(m: dict[str, Any], job: Job) -> tuple[dict[str, dict[str, int]], float]:
    """Bytes by phase and part, without those that are 0, and the share that is advised."""
    all_shapes, ranks = shapes(m), job.replicate * job.shard * job.tensor
    device, mine = job.gib * GIB, 4 * sum(on_fullest_rank(s, job) for s in all_shapes.values())
    weights = 2 * engine_values(m, job.engine)
    network, graphs = (GIB * 3 // 2 if ranks > 1 else 0), (0 if job.compile == "off" else GIB)
    forward = 2 * job.max_num_batched_tokens * per_token(m, 1, job.engine)[2]
    workspace = forward + 2 * 4 * job.max_num_seqs * m["vocab_size"]
    moments = 0 if job.offload_optimizer else 2 * mine
    share = 0.4
    if job.sleep:
        share = (device - mine - moments - GIB - network - GIB) / device - 0.06
    used = int((job.gpu_memory_utilization or share) * device)
    cache = max(0, used - weights - workspace - graphs)
    awake = {"engine weights": weights, "engine workspace": workspace, "engine cache": cache}
    stays = {} if job.sleep else awake
    trainer, step = {"weights": mine, "optimizer": moments}, training_step(m, job)
    largest = max(all_shapes.values(), key=size)
    sent = 2 * on_fullest_rank(largest, job) + (4 * size(largest) if ranks > 1 else 0)
    phases = {
        "rollout": trainer | {"gathered weights": step["gathered weights"]} | awake,
        "training": trainer | {"gradients": mine} | step | stays,
        "optimizer step": trainer | {"optimizer": 2 * mine, "gradients": mine} | stays,
        "weight sync": trainer | {"parameter sent": sent, "engine weights": weights} | stays,
    }
    sums = [sum(parts.values()) for parts in phases.values()]
    if not job.sleep:
        # What every phase has without the cache leaves, after 3 % are lost, room for the cache.
        room = device / 1.03 - max(sums) + cache - (GIB + network + graphs) / 1.03
        share = max(0.0, (weights + workspace + graphs + room) / device)
    always = {"context": GIB, "communication": network, "graphs": graphs}
    for parts, total in zip(phases.values(), sums, strict=True):
        parts.update(always, fragmentation=int(0.03 * total))
    return {
        phase: {name: part for name, part in parts.items() if part}
        for phase, parts in phases.items()
    }, share
