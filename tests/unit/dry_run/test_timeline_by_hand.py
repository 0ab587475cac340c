"""The timeline of the paper's models against sums written down from their config.json alone."""

from typing import Any

import pytest
from unit.dry_run.plan_reference import shapes
from unit.dry_run.test_plan_by_hand import config_of, model, sizes
from unit.dry_run.timeline_reference import Counts, dense_8b_on_32, experts_30b_on_1024

from rollverify.dry_run.gpus import gpu_named
from rollverify.dry_run.memory import Layout, Parameter
from rollverify.dry_run.timeline import Machine
from rollverify.dry_run.work import Pass, Work

DENSE, EXPERTS = Layout(shard=32), Layout(replicate=32, shard=32, engine=2)


def machine(name: str, layout: Layout, **settings: Any) -> Machine:
    m = model(name)
    settings["engine"] = {"tensor_parallel": layout.engine}
    return Machine(
        config=config_of(name, "32k", **settings),
        parameters=[Parameter(name=name, shape=shape) for name, shape in shapes(m).items()],
        sizes=sizes(m),
        layout=layout,
        gpu=gpu_named("H100"),
    )


def counts(scale: float, active: float) -> Counts:
    """Of a step like the paper's, on `scale` times 32 GPUs."""
    return Counts(
        steps=3471,
        active=active,
        context=4600,
        prefill=(7e6 * scale, 3e10 * scale),
        anchors=(12e6 * scale, 5e10 * scale),
        training=(5.5e6 * scale, 2.5e10 * scale),
        verification=(19e6 * scale, 9e10 * scale),
    )


def work_of(n: Counts) -> Work:
    names = ("prefill", "anchors", "training", "verification")
    passes = {name: vars(n)[name] for name in names}
    return Work(
        decode_steps=n.steps,
        active=n.active,
        context=n.context,
        generated=0.0,
        **{name: Pass(tokens=one[0], attended=one[1]) for name, one in passes.items()},
    )


# Few responses leave memory the limit, thousands arithmetic.
@pytest.mark.parametrize("active", [5, 64, 3000])
@pytest.mark.parametrize("scale", [0.05, 1])
def test_every_phase_of_the_dense_model(active: float, scale: float) -> None:
    n = counts(scale, active)
    phases = machine("8b", DENSE).timeline(work_of(n))
    found = {name: phase.seconds for name, phase in phases.items()}
    assert found == pytest.approx(dense_8b_on_32(n), rel=1e-9)


@pytest.mark.parametrize("active", [11, 128, 3000])
@pytest.mark.parametrize("scale", [1, 32])
def test_every_phase_of_the_model_with_experts(active: float, scale: float) -> None:
    n = counts(scale, active)
    phases = machine("30b_a3b", EXPERTS).timeline(work_of(n))
    found = {name: phase.seconds for name, phase in phases.items()}
    assert found == pytest.approx(experts_30b_on_1024(n), rel=1e-9)


def test_what_limits_a_phase_is_named() -> None:
    def limits(name: str, layout: Layout, active: float, scale: float) -> list[str]:
        phases = machine(name, layout).timeline(work_of(counts(scale, active)))
        return [phases[phase].limit for phase in ("decode", "training", "verification")]

    assert limits("8b", DENSE, 64, 1) == ["bandwidth", "compute", "compute"]
    # Of short passes half a row is gathered for as a whole one.
    assert limits("30b_a3b", EXPERTS, 128, 1) == ["bandwidth", "network", "network"]
    far = work_of(counts(1, 3000))
    assert machine("8b", DENSE).decode_step(far.active, 10).limit == "compute"


def test_shards_within_a_machine_are_gathered_over_nvlink() -> None:
    near = machine("8b", Layout(replicate=4, shard=8)).weight_sync().seconds
    weights = sum(one.numel for one in machine("8b", DENSE).parameters)
    assert near == pytest.approx(2 * weights * 7 / 8 / (450e9 * 0.7))


def test_further_passes_cost_what_scoring_the_batch_costs() -> None:
    work = work_of(counts(1, 64))
    settings = {"kl": {"coefficient": 0.1}, "training": {"minibatches": 2}}
    phases = machine("8b", DENSE, **settings).timeline(work)
    assert phases["KL scoring"] == phases["policy before"]
    assert 4 * phases["KL scoring"].seconds == pytest.approx(phases["training"].seconds)


def test_a_checkpoint_beside_the_steps_takes_no_time() -> None:
    quiet = machine("8b", DENSE, checkpoint={"in_background": True})
    assert "checkpoint" not in quiet.timeline(work_of(counts(1, 64)))


def test_tensor_ranks_with_an_engine_each_prefill_the_same() -> None:
    work = work_of(counts(1, 64))
    twins = machine("8b", Layout(shard=16, tensor=2)).timeline(work)["prefill"].seconds
    together = machine("8b", Layout(shard=16, tensor=2, engine=2)).timeline(work)["prefill"].seconds
    assert twins == pytest.approx(2 * together)
