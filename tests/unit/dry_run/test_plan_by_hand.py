"""The plan of the paper's models against sums written down from their config.json alone.

Shares no code with the product: layers are spelt out, every part is one line of arithmetic.
"""

import json
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from rollverify.config.load import read_config
from rollverify.dry_run.memory import Layout, Parameter, Sizes, plan_gpu

CONFIGS = Path(__file__).resolve().parents[3] / "train_configs"
GIB = 1024**3


def model(name: str) -> dict[str, Any]:
    values = json.loads((CONFIGS / "models" / f"{name}.json").read_text())
    values.setdefault("num_experts", 0)
    return values


def shapes(m: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every weight of a Qwen3 model."""
    d, h = m["hidden_size"], m["head_dim"]
    n, k = m["num_attention_heads"], m["num_key_value_heads"]
    found: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (m["vocab_size"], d)}
    if not m["tie_word_embeddings"]:
        found["lm_head.weight"] = (m["vocab_size"], d)
    for i in range(m["num_hidden_layers"]):
        at = f"layers.{i}."
        found |= {f"{at}wq": (n * h, d), f"{at}wk": (k * h, d), f"{at}wv": (k * h, d)}
        found |= {f"{at}wo": (d, n * h), f"{at}q_norm": (h,), f"{at}k_norm": (h,)}
        found |= {f"{at}attention_norm": (d,), f"{at}ffn_norm": (d,)}
        if m["num_experts"]:
            e, f = m["num_experts"], m["moe_intermediate_size"]
            found |= {f"{at}moe.experts.w1": (e, f, d), f"{at}moe.experts.w3": (e, f, d)}
            found |= {f"{at}moe.experts.w2": (e, d, f), f"{at}moe.gate": (e, d)}
        else:
            f = m["intermediate_size"]
            found |= {f"{at}w1": (f, d), f"{at}w3": (f, d), f"{at}w2": (d, f)}
    return found | {"norm.weight": (d,)}


def size(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


def expected(
    m: dict[str, Any], shard: int, settings: dict[str, dict[str, Any]], device: int
) -> dict[str, dict[str, int]]:
    """Bytes by phase and part, one tensor rank, bfloat16 on both sides."""
    training, engine = settings["training"], settings["engine"]
    d, layers, v = m["hidden_size"], m["num_hidden_layers"], m["vocab_size"]
    all_shapes = shapes(m)
    mine = 0
    for name, shape in all_shapes.items():
        rows = (
            ceil(size(shape) / shard)
            if "experts" in name
            else ceil(shape[0] / shard) * size(shape[1:])
        )
        mine += 4 * rows
    one_layer = sum(size(s) for name, s in all_shapes.items() if name.startswith("layers.0."))
    active = m.get("num_experts_per_tok", 0) if m["num_experts"] else 0
    inner = active * m["moe_intermediate_size"] if active else m["intermediate_size"]
    heads = 3 * m["num_attention_heads"] + 4 * m["num_key_value_heads"]
    per_token = 4 * d + 2 * active * d + heads * m["head_dim"] + 3 * inner
    row = training["micro_batch_tokens"]
    weights = 2 * sum(map(size, all_shapes.values()))
    workspace = 2 * per_token * engine["max_num_batched_tokens"] + 8 * engine["max_num_seqs"] * v
    moments = 0 if training["offload_optimizer"] else 2 * mine
    network = GIB * 3 // 2 if shard > 1 else 0
    free = device - mine - moments - GIB - network
    share = engine["gpu_memory_utilization"]
    if not share:
        share = (free - GIB) / device - 0.06 if engine["sleep"] else 0.4
    cache = max(0, int(share * device) - weights - workspace)
    decoding = {"engine weights": weights, "engine cache": cache, "engine workspace": workspace}
    awake = {"weights": mine, "optimizer": moments}
    step = {
        "gradients": mine,
        "gathered layers": 2 * (2 * one_layer + v * d),
        "gradient sums": 4 * max(one_layer, v * d),
        "activations": 2 * row * (d * layers + per_token),
        "backward of a layer": 2 * row * per_token,
        "log-prob head": 4 * (training["logprob_chunk_mib"] or 512) * 2**20 + 6 * v * d,
    }
    kept = {} if engine["sleep"] else decoding
    largest = max(map(size, all_shapes.values()))
    phases = {
        "decoding": awake | decoding,
        "weight sync": awake
        | {"engine weights": weights, "one parameter": 6 * largest}
        | {"engine cache": 0 if engine["sleep"] else cache},
        "training": awake | step | kept,
        "optimizer step": awake | {"optimizer": 2 * mine, "gradients": mine} | kept,
    }
    for parts in phases.values():
        total = sum(parts.values())
        parts |= {"context": GIB, "communication": network, "fragmentation": int(0.04 * total)}
        parts["graphs"] = 0 if engine["compile"] == "off" else GIB
    return phases


def sizes_of(m: dict[str, Any]) -> Sizes:
    return Sizes(
        num_layers=m["num_hidden_layers"],
        hidden_size=m["hidden_size"],
        num_heads=m["num_attention_heads"],
        num_kv_heads=m["num_key_value_heads"],
        head_dim=m["head_dim"],
        vocab_size=m["vocab_size"],
        inner_size=m["num_experts_per_tok"] * m["moe_intermediate_size"]
        if m["num_experts"]
        else m["intermediate_size"],
        experts_per_token=m["num_experts_per_tok"] if m["num_experts"] else 0,
    )


CASES = [
    ("qwen3_4b_base", 1, 80, {}, {"offload_optimizer": True}),
    ("qwen3_4b_base", 32, 80, {"sleep": False}, {}),
    ("qwen3_8b_base", 8, 80, {}, {}),
    ("qwen3_8b_base", 32, 80, {"gpu_memory_utilization": 0.45, "sleep": False}, {}),
    ("qwen3_8b_base", 8, 141, {"compile": "off"}, {"logprob_chunk_mib": 64}),
    ("qwen3_30b_a3b_base", 32, 141, {}, {"offload_optimizer": True}),
    ("qwen3_30b_a3b_base", 16, 80, {"max_num_seqs": 64}, {}),
]


@pytest.mark.parametrize(("name", "shard", "gib", "engine", "training"), CASES)
def test_every_part_of_every_phase(
    name: str, shard: int, gib: int, engine: dict[str, Any], training: dict[str, Any]
) -> None:
    m = model(name)
    files = [CONFIGS / "models" / f"{name}.toml", CONFIGS / "paper" / "dapo_math_16k.toml"]
    config = read_config([str(file) for file in files], {"engine": engine, "training": training})
    assert config.training.activation_checkpoint == "full"
    parameters = [Parameter(name=n, shape=shape) for n, shape in shapes(m).items()]
    layout = Layout(shard=shard, tensor=1, num_ranks=shard)
    plan = plan_gpu(config, parameters, sizes_of(m), layout, gib * GIB)
    settings = {"training": config.training.model_dump(), "engine": config.engine.model_dump()}
    want = expected(m, shard, settings, gib * GIB)
    got = {
        phase: {part: size for part, size in parts.items() if part != "reference"}
        for phase, parts in plan.phases.items()
    }
    assert got == want
    assert plan.cache == want["decoding"]["engine cache"]
    # A key and a value in each layer, two bytes each.
    layers, heads = m["num_hidden_layers"], m["num_key_value_heads"]
    assert plan.kv_per_token == 2 * 2 * layers * heads * m["head_dim"]


@pytest.mark.parametrize(
    ("name", "context", "ranks", "offload"),
    [("qwen3_8b_base", "32k", 8, False), ("qwen3_4b_base", "16k", 1, True)],
)
def test_the_targets_fit_into_80_gib_with_room(
    name: str, context: str, ranks: int, offload: bool
) -> None:
    """8B at 32K on eight GPUs, 4B at 16K on one with the moments in main memory: 15 GiB to spare.

    Decoding takes what is there; its cache holds several responses of full length.
    """
    m = model(name)
    files = [CONFIGS / "models" / f"{name}.toml", CONFIGS / "paper" / f"dapo_math_{context}.toml"]
    config = read_config(
        [str(file) for file in files], {"training": {"offload_optimizer": offload}}
    )
    settings = {"training": config.training.model_dump(), "engine": config.engine.model_dump()}
    phases = expected(m, ranks, settings, 80 * GIB)
    totals = {phase: sum(parts.values()) for phase, parts in phases.items()}
    assert totals.pop("decoding") < 79 * GIB
    assert max(totals.values()) < 65 * GIB
    per_token = 4 * m["num_hidden_layers"] * m["num_key_value_heads"] * m["head_dim"]
    longest = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    assert phases["decoding"]["engine cache"] > 8 * per_token * longest
