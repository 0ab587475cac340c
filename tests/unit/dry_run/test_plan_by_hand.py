"""The plan of the paper's models against sums written down from their config.json alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from unit.dry_run.plan_reference import GIB, Job, plan, shapes

from rollverify.config.load import read_config
from rollverify.config.tables import Config
from rollverify.dry_run.memory import Layout, Parameter, Plan, Sizes, plan_gpu

CONFIGS = Path(__file__).resolve().parents[3] / "train_configs"
LAYOUT = ("replicate", "shard", "tensor", "expert", "engine")
TRAINING = ("logprob_chunk_mib", "activation_checkpoint", "offload_optimizer", "micro_batch_tokens")
ENGINE = ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "sleep", "compile")


def model(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / "models" / f"qwen3_{name}_base.json").read_text())


def config_of(name: str, context: str, **settings: Any) -> Config:
    files = [f"models/qwen3_{name}_base.toml", f"paper/dapo_math_{context}.toml"]
    return read_config([str(CONFIGS / file) for file in files], settings)


def sizes(m: dict[str, Any]) -> Sizes:
    experts = m.get("num_experts_per_tok", 0)
    return Sizes(
        num_layers=m["num_hidden_layers"],
        hidden_size=m["hidden_size"],
        num_heads=m["num_attention_heads"],
        num_kv_heads=m["num_key_value_heads"],
        head_dim=m["head_dim"],
        vocab_size=m["vocab_size"],
        inner_size=experts * m["moe_intermediate_size"] if experts else m["intermediate_size"],
        experts_per_token=experts,
    )


def planned(m: dict[str, Any], config: Config, layout: Layout, gib: int) -> Plan:
    parameters = [Parameter(name=name, shape=shape) for name, shape in shapes(m).items()]
    return plan_gpu(config, parameters, sizes(m), layout, gib * GIB)


CASES = [
    ("4b", Job(offload_optimizer=True)),
    ("4b", Job(shard=32, sleep=False)),
    ("4b", Job(shard=3, activation_checkpoint="none", max_num_batched_tokens=2048)),
    ("8b", Job(shard=8)),
    ("8b", Job(replicate=4, shard=8, sleep=False, gpu_memory_utilization=0.45)),
    ("8b", Job(shard=8, tensor=2, gib=141, compile="off", logprob_chunk_mib=64)),
    ("8b", Job(shard=8, activation_checkpoint="selective", micro_batch_tokens=20000)),
    ("30b_a3b", Job(shard=32, gib=141, offload_optimizer=True)),
    ("30b_a3b", Job(shard=16, max_num_seqs=512)),
    ("30b_a3b", Job(shard=32, expert=8, gib=141, sleep=False, gpu_memory_utilization=0.6)),
    ("4b", Job(shard=8, engine=8)),
    ("8b", Job(shard=32, engine=4, sleep=False, gpu_memory_utilization=0.4)),
    ("8b", Job(replicate=2, shard=8, tensor=2, engine=2)),
    ("30b_a3b", Job(shard=32, engine=2, micro_batch_tokens=32768, max_num_seqs=128)),
    ("30b_a3b", Job(replicate=16, shard=64, engine=8)),  # more members than key-value heads
]


@pytest.mark.parametrize(("name", "job"), CASES)
def test_every_part_of_every_phase(name: str, job: Job) -> None:
    m, values = model(name), vars(job)
    config = config_of(
        name,
        "16k",
        training={key: values[key] for key in TRAINING},
        engine={key: values[key] for key in ENGINE} | {"tensor_parallel": job.engine},
    )
    got = planned(m, config, Layout(**{key: values[key] for key in LAYOUT}), job.gib)
    phases, share = plan(m, job)
    found = {
        phase: {name: part for name, part in parts.items() if part}
        for phase, parts in got.phases.items()
    }
    assert found == phases
    assert got.cache == phases["rollout"].get("engine cache", 0)
    assert got.share == pytest.approx(share, abs=1e-10)  # bytes lost are rounded down


@pytest.mark.parametrize(
    ("name", "tokens"), [("4b", 147_456), ("8b", 147_456), ("30b_a3b", 98_304)]
)
def test_a_cached_token_has_a_key_and_a_value_in_each_layer(name: str, tokens: int) -> None:
    """36 layers * 8 heads * 128 * 2 * 2 bytes; 48 layers * 4 heads."""
    one = {"tensor_parallel": 1}
    config = config_of(name, "16k", engine=one)
    assert planned(model(name), config, Layout(), 80).kv_per_token == tokens


@pytest.mark.parametrize(("engine", "tokens"), [(2, 49_152), (4, 24_576), (8, 24_576)])
def test_a_member_caches_its_heads_and_at_least_one(engine: int, tokens: int) -> None:
    """48 layers * 128 * 2 * 2 bytes are 24,576 for each of the 4 heads."""
    config = config_of("30b_a3b", "16k", engine={"tensor_parallel": engine})
    got = planned(model("30b_a3b"), config, Layout(shard=32, engine=engine), 80)
    assert got.kv_per_token == tokens


@pytest.mark.parametrize(
    ("name", "context", "ranks", "left"),
    [
        ("8b", "32k", 8, 30),
        ("4b", "16k", 1, 15),
        ("8b", "64k", 32, 25),
        ("8b", "64k", 8, 15),
        ("30b_a3b", "32k", 32, 30),
        ("30b_a3b", "64k", 32, 12),
    ],
)
def test_the_targets_fit_into_80_gb_with_room(
    name: str, context: str, ranks: int, left: int
) -> None:
    """A GPU sold as one of 80 GB has 79 GiB.

    The rollout takes what is there but a GiB, of 30B half of one; the other phases leave `left`
    GiB, and the cache holds at least four responses of full length.
    """
    config = config_of(name, context)
    layout = Layout(shard=ranks, engine=config.engine.tensor_parallel)
    got = planned(model(name), config, layout, 79)
    totals = {phase: sum(parts.values()) for phase, parts in got.phases.items()}
    assert totals.pop("rollout") < (78.5 if name == "30b_a3b" else 78) * GIB
    assert max(totals.values()) < (79 - left) * GIB
    assert got.cached_tokens > 4 * config.rollout.max_sequence_tokens


@pytest.mark.parametrize("name", ["4b", "8b"])
def test_the_advised_share_fits_an_engine_that_stays_awake(name: str) -> None:
    def totals(share: float) -> list[int]:
        engine = {"sleep": False, "gpu_memory_utilization": share}
        got = planned(model(name), config_of(name, "16k", engine=engine), Layout(shard=8), 80)
        return [sum(parts.values()) for parts in got.phases.values()]

    engine = {"sleep": False}
    share = planned(model(name), config_of(name, "16k", engine=engine), Layout(shard=8), 80).share
    assert max(totals(share)) <= 80 * GIB < max(totals(share + 0.001))
