"""The timeline of a planned step in words, and what other settings would make of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollverify.config.tables import Config
from rollverify.dry_run.gpus import GPUS_PER_NODE, Gpu
from rollverify.dry_run.memory import Layout, Parameter, Plan, Sizes, plan_gpu
from rollverify.dry_run.timeline import Machine, Phase
from rollverify.dry_run.work import Assumptions, Work, work_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """All that a forecast follows from."""

    config: Config
    parameters: Sequence[Parameter]
    sizes: Sizes
    layout: Layout
    gpu: Gpu
    device: int
    """Bytes of memory to plan with."""
    assumed: Assumptions

    @property
    def machine(self) -> Machine:
        """The model on its ranks."""
        return Machine(
            config=self.config,
            parameters=self.parameters,
            sizes=self.sizes,
            layout=self.layout,
            gpu=self.gpu,
        )

    def plan(self) -> Plan:
        """The memory of its ranks."""
        return plan_gpu(self.config, self.parameters, self.sizes, self.layout, self.device)

    def work(self) -> Work | None:
        """Counts of a step; None where the memory does not do."""
        plan = self.plan()
        fits = all(sum(parts.values()) <= plan.device for parts in plan.phases.values())
        if not fits or plan.cached_tokens < self.config.rollout.max_sequence_tokens:
            return None
        return work_of(self.config, self.layout, plan.cached_tokens, self.assumed)

    def seconds(self) -> float | None:
        """Of a step; None where the memory does not do."""
        work = self.work()
        return None if work is None else in_all(self.machine.timeline(work))

    def with_engines_over(self, members: int) -> "Job":
        """The same with other engines."""
        engine = self.config.engine.model_copy(update={"tensor_parallel": members})
        config = self.config.model_copy(update={"engine": engine})
        return replace(self, config=config, layout=replace(self.layout, engine=members))

    def with_in_flight(self, oversampling: float, num_seqs: int) -> "Job":
        """The same with another number of responses in flight."""
        rollout = self.config.rollout.model_copy(update={"oversampling": oversampling})
        engine = self.config.engine.model_copy(update={"max_num_seqs": num_seqs})
        config = self.config.model_copy(update={"rollout": rollout, "engine": engine})
        return replace(self, config=config)


def in_all(phases: dict[str, Phase]) -> float:
    """Seconds of a step, whose phases follow each other."""
    return sum(phase.seconds for phase in phases.values())


def alternatives(job: Job) -> dict[str, Job]:
    """Larger engines, and more and fewer responses in flight, as far as they are allowed."""
    config, layout, sizes = job.config, job.layout, job.sizes
    rollout, num_seqs = config.rollout, config.engine.max_num_seqs
    found: dict[str, Job] = {}
    members = 2 * layout.engine
    heads = sizes.num_kv_heads
    divides = layout.num_ranks % members == 0 and sizes.num_heads % members == 0
    if divides and max(heads, members) % min(heads, members) == 0 and members <= GPUS_PER_NODE:
        found[f"engine.tensor_parallel = {members}"] = job.with_engines_over(members)
    if config.method.name == "on_policy":
        return found
    for times in (2.0, 0.5):
        value = rollout.oversampling * times
        if value >= 1:
            more = max(num_seqs, round(num_seqs * times))
            name = f"rollout.oversampling = {value:g}"
            if more != num_seqs:
                name += f", engine.max_num_seqs = {more}"
            found[name] = job.with_in_flight(value, more)
    return found


def assumption_lines(job: Job) -> list[str]:
    """What a timeline rests on."""
    lengths = job.assumed.lengths
    median, mean = float(lengths.groups.median()), lengths.moment(1)
    lines = [
        f"one step on {job.layout.num_ranks} x {job.gpu.name}, computed, not measured",
        f"responses of {median:,.0f} tokens in the median, {mean:,.0f} in the mean, "
        f"{lengths.limit_frac:.1%} cut at the limit",
    ]
    if job.config.method.name == "rollverify":
        lines.append(f"of the tokens verified {job.assumed.acceptance:.0%} are kept")
    return lines


def forecast_lines(job: Job) -> list[str]:
    """Seconds and share of each phase with what limits it, the decode step, the alternatives."""
    work = job.work()
    if work is None:
        return ["no timeline of a step that does not fit"]
    phases = job.machine.timeline(work)
    total = in_all(phases)
    lines = [*assumption_lines(job), f"{'':<22}{'seconds':>10}{'share':>8}  limited by"]
    for name, phase in phases.items():
        share = phase.seconds / total
        lines.append(f"  {name:<20}{phase.seconds:10.1f}{share:8.1%}  {phase.limit}")
    lines.append(f"  {'in all':<20}{total:10.1f}")
    step = job.machine.decode_step(work.active, work.context)
    c1 = (step.seconds - step.fixed) / work.active
    lines.append(
        f"{work.decode_steps:,.0f} decode steps of {1e3 * step.fixed:.2f} ms and {1e3 * c1:.3f} ms "
        f"for each of {work.active:.0f} responses; {work.generated:,.0f} tokens are decoded, "
        f"{work.training.tokens:,.0f} trained with their prompts, "
        f"{work.verification.tokens:,.0f} verified"
    )
    for name, other in alternatives(job).items():
        seconds = other.seconds()
        change = "does not fit" if seconds is None else f"{seconds:.1f} s in place of {total:.1f}"
        lines.append(f"with {name}: {change}")
    return lines
