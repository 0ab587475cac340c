"""Writes a model as a Hugging Face folder that transformers and vLLM load.

Weights are streamed into safetensors shards of bounded size; the folder appears under its name only
when it is complete.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 4 * 2**30
INDEX_FILE = "model.safetensors.index.json"
_KEPT_FROM_SOURCE = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


def write_hf_folder(
    folder: str | Path,
    parameters: Iterator[tuple[str, Tensor]],
    *,
    source: str | Path,
    is_writer: bool,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write weights, and config and tokenizer files of the model they came from.

    Collective where `parameters` gathers over ranks.

    Args:
        folder: an existing one is replaced at the end, in one rename; an error leaves it alone.
        parameters: (Hugging Face name, full tensor); exhausted on every rank.
        source: folder whose config and tokenizer files are copied.
        is_writer: True on one rank; the others only take part in gathering.
        shard_bytes: largest safetensors file.
    """
    if not is_writer:
        for _ in parameters:
            pass
        return
    target = Path(folder)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write_weights(partial, parameters, shard_bytes)
        for name in _KEPT_FROM_SOURCE:
            if (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, partial / name)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_weights(
    folder: Path, parameters: Iterator[tuple[str, Tensor]], shard_bytes: int
) -> None:
    """Shards are numbered as they fill up and renamed once their number is known."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal pending, size
        save_file(pending, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending, size = {}, 0

    for name, tensor in parameters:
        copy = tensor.detach().to("cpu", copy=True).contiguous()
        num_bytes = copy.numel() * copy.element_size()
        if pending and size + num_bytes > shard_bytes:
            flush()
        pending[name] = copy
        size += num_bytes
        total += num_bytes
    flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True))


def write_random_hf_folder(folder: str | Path, config: dict, *, seed: int) -> None:
    """Write `config.json` and weights drawn at random from `seed` into a folder that may be new.

    Raises:
        ModelFolderError: if the config is not supported.
    """
    from torchtitan_ext.models.specs import model_spec_from_hf

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config, indent=2))
    spec = model_spec_from_hf(target)
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = spec.model.build()
        with torch.no_grad():
            model.init_weights(buffer_device=torch.device("cpu"))
        assert spec.state_dict_adapter is not None
        weights = spec.state_dict_adapter(spec.model, None).to_hf(model.state_dict())
    finally:
        torch.random.set_rng_state(state)
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in weights.items()},
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
