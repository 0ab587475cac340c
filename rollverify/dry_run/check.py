"""Checks a config against its model and prints the memory of a GPU: `python -m rollverify.dry_run`.

Takes the flags of a run, and `--world-size N`, `--gpu-gib G`, `--model-config FILE`; for the
timeline of a step `--gpu NAME`, `--median-response-tokens N`, by default an eighth of the limit,
and `--acceptance A`, 0.9. The model is built on the meta device, so no weight is read, no rank
started and no prompt opened. Exit code 2 where the config does not fit model or memory.
"""

import argparse
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rollverify.config.environment import set_defaults
from rollverify.config.load import load_config
from rollverify.config.rules import check_world_size
from rollverify.config.tables import Config
from rollverify.dry_run.advice import (
    advised_settings,
    num_in_flight,
    preemption_warning,
    problems,
)
from rollverify.dry_run.forecast import Job, forecast_lines
from rollverify.dry_run.gpus import Gpu, gpu_named, gpu_of_memory
from rollverify.dry_run.lengths import sample_lengths
from rollverify.dry_run.memory import GIB, Layout, Parameter, Plan, Sizes, plan_cpu, plan_gpu
from rollverify.dry_run.work import Assumptions
from rollverify.errors import ConfigError, RollVerifyError, exit_code
from rollverify.toy.settings import base_folder

if TYPE_CHECKING:
    from torchtitan_ext.models.hf_config import HfConfig
    from torchtitan_ext.models.meta import MetaModel


def layout_of(config: Config, world_size: int) -> Layout:
    """The degrees of a config that passed `check_world_size`."""
    parallelism = config.parallelism
    replicate, tensor = parallelism.data_parallel_replicate, parallelism.tensor_parallel
    return Layout(
        replicate=replicate,
        shard=world_size // (replicate * tensor),
        tensor=tensor,
        expert=parallelism.expert_parallel,
        engine=config.engine.tensor_parallel,
    )


def read_model(folder: Path, layout: Layout) -> "MetaModel":
    """The model without weights, checked against the degrees and the weights that lie there.

    Raises:
        ConfigError: the folder and what is wrong with it.
    """
    from torchtitan_ext.models.hf_config import ModelFolderError
    from torchtitan_ext.models.meta import build_meta_model, check_stored, stored_shapes

    try:
        model = build_meta_model(
            folder,
            replicate=layout.replicate,
            shard=layout.shard,
            tensor=layout.tensor,
            expert=layout.expert,
        )
        stored = stored_shapes(folder)
        if stored:
            check_stored(folder, model.hf_shapes, stored)
        else:
            print("no weights to compare names and shapes with")
    except ModelFolderError as error:
        raise ConfigError(f"model.path: {error}") from error
    return model


def sizes_of(model: "HfConfig") -> Sizes:
    """What the memory depends on."""
    experts = model.experts
    return Sizes(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        num_heads=model.num_attention_heads,
        num_kv_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        inner_size=experts.top_k * experts.hidden_size if experts else model.intermediate_size,
        experts_per_token=experts.top_k if experts else 0,
    )


def context_problems(config: Config, context: int) -> list[str]:
    """One line if the model's context is too short; the memory can be planned all the same."""
    longest = config.rollout.max_sequence_tokens
    if longest <= context:
        return []
    return [
        f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest} exceeds the "
        f"model's context of {context} tokens; lower one of them, or raise "
        "max_position_embeddings in its config.json if it can do more"
    ]


def check_model(sizes: Sizes, tensor: int, engine: int) -> None:
    """Refuse numbers of tensor ranks and of an engine's ranks that the model cannot have."""
    for name, number, is_divided in (
        ("attention heads", sizes.num_heads, sizes.num_heads % engine == 0),
        (
            "key-value heads, nor is it a multiple of them",
            sizes.num_kv_heads,
            max(sizes.num_kv_heads, engine) % min(sizes.num_kv_heads, engine) == 0,
        ),
    ):
        if not is_divided:
            raise ConfigError(
                f"engine.tensor_parallel = {engine} does not divide the model's {number} {name}; "
                "choose a divisor"
            )
    for name, number in (
        ("attention heads", sizes.num_heads),
        ("key-value heads", sizes.num_kv_heads),
        ("embeddings", sizes.vocab_size),
    ):
        if number % tensor:
            raise ConfigError(
                f"parallelism.tensor_parallel = {tensor} does not divide the model's {number} "
                f"{name}; choose a divisor"
            )


def parameters_of(model: "MetaModel") -> list[Parameter]:
    """Its weights before they are sharded."""
    return [Parameter(name=name, shape=shape) for name, shape in model.parameters.items()]


def make_plan(config: Config, model: "MetaModel", layout: Layout, gpu_gib: float | None) -> Plan:
    """Bytes of the fullest device; without a GPU, ranks share this machine's memory.

    Raises:
        ConfigError: for tensor ranks that the model cannot have.
    """
    sizes = sizes_of(model.config)
    check_model(sizes, layout.tensor, layout.engine)
    parameters = parameters_of(model)
    if gpu_gib is not None:
        return plan_gpu(config, parameters, sizes, layout, int(gpu_gib * GIB))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // layout.num_ranks
    return plan_cpu(config, parameters, sizes, layout, memory)


def print_plan(config: Config, plan: Plan, layout: Layout) -> None:
    """A column for each phase, then what the cache holds."""
    rollout, longest = config.rollout, config.rollout.max_sequence_tokens
    print(f"{rollout.prompts_per_step} prompts x {rollout.group_size}, up to {longest:,} tokens")
    print(f"{num_in_flight(config, layout):,} responses in flight on an engine")
    phases = plan.phases.values()
    totals = [sum(parts.values()) for parts in phases]
    rows = {name: [parts.get(name, 0) for parts in phases] for parts in phases for name in parts}
    rows |= {"in all": totals, "left": [plan.device - total for total in totals]}
    print(f"{f'GiB of {plan.device / GIB:.1f}':<22}" + "".join(f"{p:>16}" for p in plan.phases))
    for name, values in rows.items():
        if any(values):
            print(f"  {name:<20}" + "".join(f"{value / GIB:16.2f}" for value in values))
    cached = plan.cached_tokens
    print(f"the cache holds {cached:,} tokens, {cached / longest:.1f} responses of full length")
    print("activations, workspace and what libraries take are estimates, not measured")
    for line in preemption_warning(config, plan, layout):
        print(line)


def print_timeline(config: Config, model: "MetaModel", layout: Layout, options: "Options") -> None:
    """Seconds of a step by phase on the GPU asked for or at hand; why there are none, where so."""
    gib, gpu = options.gpu_gib, options.gpu
    if gib is None:
        return
    if gpu is None:
        print(f"no timeline: no GPU is known by its {gib:.0f} GiB; name one with --gpu")
        return
    if {config.training.dtype, config.engine.dtype} != {"bfloat16"}:
        print("no timeline: it is for bfloat16, in training.dtype and engine.dtype")
        return
    rollout = config.rollout
    median = options.median_response_tokens or rollout.max_response_tokens / 8
    lengths = sample_lengths(median, rollout.max_response_tokens, rollout.group_size)
    job = Job(
        config=config,
        parameters=parameters_of(model),
        sizes=sizes_of(model.config),
        layout=layout,
        gpu=gpu,
        device=int(gib * GIB),
        assumed=Assumptions(lengths=lengths, acceptance=options.acceptance),
    )
    print(*forecast_lines(job), sep="\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The flags that are no settings of a run."""

    world_size: int
    model_config: Path | None
    gpu: Gpu | None
    gpu_gib: float | None
    """Memory of the GPU to plan for; None where there is none."""
    median_response_tokens: float | None
    acceptance: float


def read_options(given: argparse.Namespace) -> Options:
    """The flags, checked, with what follows from the machine.

    Raises:
        ConfigError: the flag that is wrong.
    """
    import torch

    if given.world_size < 1:
        raise ConfigError("--world-size must be above 0")
    for name in ("gpu_gib", "median_response_tokens"):
        value = vars(given)[name]
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} must be a finite number above 0")
    if not 0 <= given.acceptance <= 1:
        raise ConfigError("--acceptance must be between 0 and 1")
    gib, gpu = given.gpu_gib, gpu_named(given.gpu) if given.gpu else None
    if gib is None and gpu is not None:
        gib = gpu.memory_gib
    elif gib is None and torch.cuda.is_available():
        gib = torch.cuda.get_device_properties(0).total_memory / GIB
    if gpu is None and gib is not None:
        gpu = gpu_of_memory(gib)
    return Options(
        world_size=given.world_size,
        model_config=given.model_config,
        gpu=gpu,
        gpu_gib=gib,
        median_response_tokens=given.median_response_tokens,
        acceptance=given.acceptance,
    )


def _model_folder(config: Config, model_config: Path | None, scratch: Path) -> Path:
    """The run's model folder, or one that holds only the config.json given."""
    if model_config is None:
        return Path(config.model.path) if config.model.path else base_folder(config.prepare)
    try:
        shutil.copyfile(model_config, scratch / "config.json")
    except OSError as error:
        raise ConfigError(
            f"--model-config: '{model_config}' cannot be read ({error.strerror})"
        ) from error
    return scratch


def _as_given(message: str, scratch: str, model_config: Path | None) -> str:
    """A message that names the file of --model-config in place of its copy."""
    if model_config is None:
        return message
    message = message.replace(f"{scratch}': config.json: ", f"{scratch}': ")
    for name in (f"{scratch}/config.json", scratch):
        message = message.replace(name, str(model_config))
    return message.replace("model.path: ", "--model-config: ", 1)


class _OneLineParser(argparse.ArgumentParser):
    """Says what is wrong as every other mistake is said."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _dry_run(options: Options, flags: Sequence[str]) -> list[str]:
    """What does not fit, after the plan was printed."""
    prog = (
        "python -m rollverify.dry_run [--world-size N] [--gpu NAME] [--gpu-gib G] "
        "[--model-config FILE] [--median-response-tokens N] [--acceptance A]"
    )
    config = load_config(flags, prog=prog).config
    check_world_size(config, options.world_size)
    layout = layout_of(config, options.world_size)
    with tempfile.TemporaryDirectory() as scratch:
        folder = _model_folder(config, options.model_config, Path(scratch))
        try:
            model = read_model(folder, layout)
        except ConfigError as error:
            raise ConfigError(_as_given(str(error), scratch, options.model_config)) from error
    plan = make_plan(config, model, layout, options.gpu_gib)
    num_parameters = sum(math.prod(shape) for shape in model.parameters.values())
    degrees = f"{layout.replicate} x {layout.shard} x {layout.tensor}"
    engines = "" if layout.engine == 1 else f", an engine over {layout.engine} of them"
    print(f"{num_parameters:,} parameters, {layout.num_ranks} ranks = {degrees}{engines}")
    print_plan(config, plan, layout)
    print_timeline(config, model, layout, options)
    print("settings by this plan:", *advised_settings(config, plan, layout), sep="\n")
    return context_problems(config, model.config.max_position_embeddings) + problems(
        config, plan, layout, model.config.num_hidden_layers
    )


def main(argv: Sequence[str]) -> int:
    """Check and plan the run of a command line; return the exit code."""
    parser = _OneLineParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--gpu")
    parser.add_argument("--gpu-gib", type=float)
    parser.add_argument("--median-response-tokens", type=float)
    parser.add_argument("--acceptance", type=float, default=0.9)
    parser.add_argument("--model-config", type=Path)
    set_defaults()
    try:
        given, flags = parser.parse_known_args(argv)
        found = _dry_run(read_options(given), flags)
    except RollVerifyError as error:
        sys.stderr.write(f"error: {error}\n")
        return exit_code(error)
    for line in found:
        sys.stderr.write(f"error: {line}\n")
    return 2 if found else 0
