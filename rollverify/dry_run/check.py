"""Checks a config against its model and prints the memory of a GPU: `python -m rollverify.dry_run`.

Takes the flags of a run, and `--world-size N`, `--gpu-gib G`, `--model-config FILE`. The model is
built on the meta device, so no weight is read, no rank started and no prompt opened. Exit code 2
where the config does not fit model or memory.
"""

import argparse
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rollverify.config.environment import set_defaults
from rollverify.config.load import load_config
from rollverify.config.rules import check_world_size
from rollverify.config.tables import Config
from rollverify.dry_run.memory import (
    DTYPE_BYTES,
    GIB,
    Layout,
    Parameter,
    Plan,
    Sizes,
    plan_cpu,
    plan_gpu,
    problems,
)
from rollverify.errors import ConfigError, RollVerifyError, exit_code
from rollverify.toy.settings import base_folder

if TYPE_CHECKING:
    from torchtitan_ext.models.hf_config import HfConfig
    from torchtitan_ext.models.meta import MetaModel


def degrees(config: Config, world_size: int) -> tuple[int, int, int]:
    """(replicate, shard, tensor) of a config that passed `check_world_size`."""
    parallelism = config.parallelism
    replicate, tensor = parallelism.data_parallel_replicate, parallelism.tensor_parallel
    return replicate, world_size // (replicate * tensor), tensor


def read_model(config: Config, folder: Path, world_size: int) -> "MetaModel":
    """The model without weights, checked against the degrees and the weights that lie there.

    Raises:
        ConfigError: the folder and what is wrong with it.
    """
    from torchtitan_ext.models.hf_config import ModelFolderError
    from torchtitan_ext.models.meta import build_meta_model, check_stored, stored_shapes

    replicate, shard, tensor = degrees(config, world_size)
    expert = config.parallelism.expert_parallel
    try:
        model = build_meta_model(
            folder, replicate=replicate, shard=shard, tensor=tensor, expert=expert
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


def check_model(config: Config, sizes: Sizes) -> None:
    """Refuse a number of tensor ranks that the model cannot have."""
    tensor = config.parallelism.tensor_parallel
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


def make_plan(config: Config, model: "MetaModel", world_size: int, gpu_gib: float | None) -> Plan:
    """Bytes of the fullest device; without a GPU, ranks share this machine's memory.

    Raises:
        ConfigError: for tensor ranks that the model cannot have.
    """
    sizes = sizes_of(model.config)
    check_model(config, sizes)
    _, shard, tensor = degrees(config, world_size)
    layout = Layout(shard=shard, tensor=tensor, num_ranks=world_size)
    parameters = [Parameter(name=name, shape=shape) for name, shape in model.parameters.items()]
    if gpu_gib is not None:
        return plan_gpu(config, parameters, sizes, layout, int(gpu_gib * GIB))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return plan_cpu(config, parameters, sizes, layout, memory // world_size)


def print_plan(config: Config, plan: Plan, world_size: int) -> None:
    """The plan as a table on the standard output, and the engine settings that follow from it."""
    rollout, longest = config.rollout, config.rollout.max_sequence_tokens
    replicate, shard, tensor = degrees(config, world_size)
    in_flight = rollout.prompts_per_step * rollout.group_size / (replicate * shard)
    in_flight *= 1.0 if config.method.name == "on_policy" else rollout.oversampling
    num_parameters = plan.engine_weights // DTYPE_BYTES[config.engine.dtype]
    print(f"{num_parameters:,} parameters, {world_size} ranks = {replicate} x {shard} x {tensor}")
    print(f"{rollout.prompts_per_step} prompts x {rollout.group_size}, up to {longest:,} tokens")
    print(f"{in_flight:,.0f} responses in flight on an engine")
    print(f"  {'GiB':<20}" + "".join(f"{phase:>16}" for phase in plan.phases))
    names = dict.fromkeys(name for parts in plan.phases.values() for name in parts)
    for name in names:
        sizes = [parts.get(name, 0) for parts in plan.phases.values()]
        if any(sizes):
            print(f"  {name:<20}" + "".join(f"{size / GIB:16.2f}" for size in sizes))
    totals = [sum(parts.values()) for parts in plan.phases.values()]
    print(f"  {'in all':<20}" + "".join(f"{total / GIB:16.2f}" for total in totals))
    print(f"  of {plan.device / GIB:.1f}; activations and what libraries take are estimates")
    full, half = plan.cached_tokens / longest, plan.cached_tokens // max(1, longest // 2)
    print(f"the cache holds {plan.cached_tokens:,} tokens, {full:.1f} responses of full length")
    best = max(1, min(math.ceil(in_flight), half))
    if best < in_flight:
        print(
            f"warning: that is less than half the length of {in_flight:,.0f} responses: the engine "
            "will compute some again when they have to make room for others"
        )
    if best != config.engine.max_num_seqs:
        print(f"by this plan: engine.max_num_seqs = {best}")


def _gpu_gib(asked: float | None) -> float | None:
    """Memory of the GPU to plan for; None where there is none."""
    import torch

    if asked is not None or not torch.cuda.is_available():
        return asked
    return torch.cuda.get_device_properties(0).total_memory / GIB


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


def _dry_run(options: argparse.Namespace, flags: Sequence[str]) -> list[str]:
    """What does not fit, after the plan was printed."""
    if options.world_size < 1:
        raise ConfigError("--world-size must be above 0")
    if options.gpu_gib is not None and not 0 < options.gpu_gib < math.inf:
        raise ConfigError("--gpu-gib must be a finite number above 0")
    prog = "python -m rollverify.dry_run [--world-size N] [--gpu-gib G] [--model-config FILE]"
    config = load_config(flags, prog=prog).config
    check_world_size(config, options.world_size)
    with tempfile.TemporaryDirectory() as scratch:
        folder = _model_folder(config, options.model_config, Path(scratch))
        try:
            model = read_model(config, folder, options.world_size)
        except ConfigError as error:
            raise ConfigError(_as_given(str(error), scratch, options.model_config)) from error
    gpu_gib = _gpu_gib(options.gpu_gib)
    plan = make_plan(config, model, options.world_size, gpu_gib)
    print_plan(config, plan, options.world_size)
    return context_problems(config, model.config.max_position_embeddings) + problems(
        plan,
        config,
        num_layers=model.config.num_hidden_layers,
        num_ranks=options.world_size,
        on_gpu=gpu_gib is not None,
    )


def main(argv: Sequence[str]) -> int:
    """Check and plan the run of a command line; return the exit code."""
    parser = _OneLineParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--gpu-gib", type=float)
    parser.add_argument("--model-config", type=Path)
    set_defaults()
    try:
        options, flags = parser.parse_known_args(argv)
        found = _dry_run(options, flags)
    except RollVerifyError as error:
        sys.stderr.write(f"error: {error}\n")
        return exit_code(error)
    for line in found:
        sys.stderr.write(f"error: {line}\n")
    return 2 if found else 0
