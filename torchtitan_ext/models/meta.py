"""A model without weights: its parameters' shapes, its names in a folder, and what a folder holds.

Built on the meta device, in seconds whatever its size; no rank is started.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
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
    """Build the model of a config.json and check the degrees of parallelism against its experts.

    `replicate` counts copies of the sharded model, `shard` the ranks that share its parameters,
    `tensor` those that share each matrix, `expert` those over which experts are spread.

    Raises:
        ModelFolderError: one line that names the folder and the key.
    """
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
        parameters={name: tuple(tensor.shape) for name, tensor in model.named_parameters()},
        hf_shapes={name: tuple(tensor.shape) for name, tensor in hf.items()},
    )


def stored_shapes(folder: str | Path) -> Shapes:
    """Shapes by name from the headers of a folder's safetensors files; empty where there are none.

    Raises:
        ModelFolderError: if a file is not in that format.
    """
    shapes: Shapes = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        try:
            with file.open("rb") as stream:
                (size,) = struct.unpack("<Q", stream.read(8))
                header = json.loads(stream.read(min(size, file.stat().st_size)))
            header.pop("__metadata__", None)
            shapes |= {name: tuple(entry["shape"]) for name, entry in header.items()}
        except (struct.error, ValueError, AttributeError, TypeError, KeyError):
            raise ModelFolderError(f"{file} is not a safetensors file; copy it again") from None
    return shapes


def check_stored(folder: object, wanted: Shapes, stored: Shapes) -> None:
    """Compare names and shapes of a folder's weights with the model that its config.json describes.

    Raises:
        ModelFolderError: one line with the first difference and the number of others.
    """
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
