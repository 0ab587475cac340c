"""A model without weights: its parameters' shapes, its names in a folder, and what a folder holds.

Built on the meta device, in seconds whatever its size.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torchtitan.distributed import ParallelDims

from torchtitan_ext.models.hf_config import HfConfig, ModelFolderError, read_hf_config
from torchtitan_ext.models.specs import check_expert_shards, model_spec_from_hf

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class MetaModel:
    """Shapes of a model."""

    config: HfConfig
    parameters: Shapes
    """By torchtitan's names, tied ones once."""

    hf_shapes: Shapes
    """By Hugging Face names, as a folder must hold them."""


def build_meta_model(
    folder: str | Path, *, replicate: int, shard: int, tensor: int, expert: int
) -> MetaModel:
    """The model of a config.json; ModelFolderError where its experts do not fit the degrees."""
    spec = model_spec_from_hf(folder)
    with torch.device("meta"):
        model = spec.model.build()
    dims = ParallelDims(
        dp_replicate=replicate,
        dp_shard=shard,
        cp=1,
        tp=tensor,
        pp=1,
        ep=expert,
        world_size=replicate * shard * tensor,
        spmd_backend="partial_dtensor",
    )
    check_expert_shards(model, dims)
    assert spec.state_dict_adapter is not None
    hf = spec.state_dict_adapter(spec.model, None).to_hf(model.state_dict())
    return MetaModel(
        config=read_hf_config(folder),
        parameters={name: tuple(weight.shape) for name, weight in model.named_parameters()},
        hf_shapes={name: tuple(weight.shape) for name, weight in hf.items()},
    )


def stored_shapes(folder: str | Path) -> Shapes:
    """Shapes in a folder's safetensors, maybe none; ModelFolderError for a broken file."""
    shapes: Shapes = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                names = list(tensors.keys())
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
        except SafetensorError:
            raise ModelFolderError(f"{file} is not a safetensors file; copy it again") from None
    return shapes


def check_stored(folder: object, wanted: Shapes, stored: Shapes) -> None:
    """Refuse weights whose names or shapes are not those that the config.json describes."""
    bad = [f"{name} is missing" for name in sorted(wanted.keys() - stored.keys())]
    bad += [
        f"{name} has shape {list(stored[name])}, config.json means {list(shape)}"
        for name, shape in sorted(wanted.items())
        if name in stored and stored[name] != shape
    ]
    if bad:
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise ModelFolderError(
            f"'{folder}': {bad[0]}{more}; its weights belong to another config.json"
        )
