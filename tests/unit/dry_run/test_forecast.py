"""Which other settings a forecast tries, and the figures of GPUs that it is computed from."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from unit.dry_run.test_timeline_by_hand import machine

from rollverify.dry_run.forecast import Job, alternatives, forecast_lines, in_all
from rollverify.dry_run.gpus import GPUS, gpu_named, gpu_of_memory
from rollverify.dry_run.lengths import sample_lengths
from rollverify.dry_run.memory import GIB, Layout
from rollverify.dry_run.work import Assumptions
from rollverify.errors import ConfigError


def job(layout: Layout, *, gib: int = 79, **settings: dict[str, Any]) -> Job:
    one = machine("8b", layout, **settings)
    return Job(
        config=one.config,
        parameters=one.parameters,
        sizes=one.sizes,
        layout=layout,
        gpu=one.gpu,
        device=gib * GIB,
        assumed=Assumptions(lengths=sample_lengths(2500, 30720, 8), acceptance=0.9),
    )


def test_larger_engines_and_other_numbers_in_flight_are_tried() -> None:
    assert list(alternatives(job(Layout(shard=32)))) == [
        "engine.tensor_parallel = 2",
        "rollout.oversampling = 4, engine.max_num_seqs = 256",
        "rollout.oversampling = 1",
    ]


@pytest.mark.parametrize("layout", [Layout(shard=3), Layout(shard=32, engine=8)])
def test_an_engine_has_ranks_of_one_machine_that_divide_all(layout: Layout) -> None:
    on_policy = job(layout, method={"name": "on_policy"})
    assert alternatives(on_policy) == {}


def test_an_alternative_is_planned_anew() -> None:
    """Half of the weights on each leaves more than twice the cache for twice the responses."""
    one = job(Layout(shard=32))
    two = alternatives(one)["engine.tensor_parallel = 2"]
    assert two.layout.num_engines == 16 and two.config.engine.tensor_parallel == 2
    assert two.plan().cached_tokens > 2 * one.plan().cached_tokens
    assert two.seconds() == job(Layout(shard=32, engine=2)).seconds()


def test_lines_add_up_and_name_the_alternatives() -> None:
    one = job(Layout(shard=32))
    lines = forecast_lines(one)
    *rows, end = [line.split() for line in lines if line.startswith("  ") and "share" not in line]
    total = float(end[-1])
    assert [row[0] for row in rows[:3]] == ["decode", "prefill", "anchors"]
    assert sum(float(row[-3]) for row in rows) == pytest.approx(total, abs=0.4)
    assert sum(float(row[-2].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.4)
    assert total == pytest.approx(one.seconds(), abs=0.05)
    assert sum(line.startswith("with ") for line in lines) == 3


def test_a_step_that_does_not_fit_has_no_timeline() -> None:
    small = job(Layout(shard=32), gib=24)
    assert small.seconds() is None
    assert forecast_lines(small) == ["no timeline of a step that does not fit"]


def test_faster_memory_shortens_decoding_and_nothing_else() -> None:
    one = job(Layout(shard=32))
    fast = replace(one, gpu=replace(one.gpu, memory_bandwidth=2 * one.gpu.memory_bandwidth))
    work = one.work()
    assert work is not None
    before, after = one.machine.timeline(work), fast.machine.timeline(work)
    assert after["decode"].seconds < before.pop("decode").seconds
    assert all(after[name] == phase for name, phase in before.items())
    assert in_all(after) < in_all(before) + after["decode"].seconds + 1e-9


@pytest.mark.parametrize(
    ("name", "found"), [("NVIDIA H200", "H200"), ("h100", "H100"), ("A100-SXM4-80GB", "A100")]
)
def test_a_gpu_is_known_by_its_driver_s_name(name: str, found: str) -> None:
    assert gpu_named(name).name == found


def test_a_gpu_without_figures_is_refused() -> None:
    with pytest.raises(ConfigError, match="no figures of 'T4'; choose one of A100, H100"):
        gpu_named("T4")


@pytest.mark.parametrize(
    ("gib", "found"), [(80, "H100"), (79.2, "H100"), (141, "H200"), (180, "B200"), (24, None)]
)
def test_a_gpu_is_known_by_its_memory(gib: float, found: str | None) -> None:
    gpu = gpu_of_memory(gib)
    assert (gpu and gpu.name) == found


def test_figures_are_in_units_of_one_second_and_one_direction() -> None:
    """NVIDIA prints 2 x 989.5 TFLOPS with sparsity and 900 GB/s in both directions for an H100."""
    h100 = gpu_named("H100")
    assert (h100.flops, h100.nvlink, h100.network) == (989e12, 900e9 / 2, 400e9 / 8)
    for older, newer in pairwise(GPUS):
        assert newer.memory_bandwidth > older.memory_bandwidth and newer.flops >= older.flops
