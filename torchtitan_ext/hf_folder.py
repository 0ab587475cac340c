"""Writes a model as a Hugging Face folder that transformers and vLLM load."""

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
    """Write weights, and config and tokenizer files of `source`; replaces `folder` in one rename.

    `is_writer` is True on one rank; all exhaust `parameters`, (Hugging Face name, full tensor).
    Collective where those are gathered.
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
    """Shards get their names once their number is known."""
    shard_of: dict[str, int] = {}
    num_shards = total_bytes = 0
    for num_shards, (tensors, num_bytes) in enumerate(_shards(parameters, shard_bytes), 1):
        save_file(tensors, folder / f"shard-{num_shards}", metadata={"format": "pt"})
        shard_of |= dict.fromkeys(tensors, num_shards)
        total_bytes += num_bytes
    if num_shards == 1:
        (folder / "shard-1").rename(folder / "model.safetensors")
        return
    files = {n: f"model-{n:05d}-of-{num_shards:05d}.safetensors" for n in range(1, num_shards + 1)}
    for number, file in files.items():
        (folder / f"shard-{number}").rename(folder / file)
    weight_map = {name: files[number] for name, number in shard_of.items()}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True))


def _shards(
    parameters: Iterator[tuple[str, Tensor]], shard_bytes: int
) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Copies on the CPU of as many tensors as fit into a shard, and their bytes."""
    tensors: dict[str, Tensor] = {}
    size = 0
    for name, tensor in parameters:
        if tensors and size + tensor.nbytes > shard_bytes:
            yield tensors, size
            tensors, size = {}, 0
        tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
    yield tensors, size


def write_random_hf_folder(folder: str | Path, config: dict, *, seed: int) -> None:
    """Write `config.json` and random weights; ModelFolderError if it is not supported."""
    from torchtitan_ext.models.specs import model_spec_from_hf

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config, indent=2))
    spec = model_spec_from_hf(target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = spec.model.build()
        with torch.no_grad():
            model.init_weights(buffer_device=torch.device("cpu"))
    assert spec.state_dict_adapter is not None
    weights = spec.state_dict_adapter(spec.model, None).to_hf(model.state_dict())
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in weights.items()},
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
