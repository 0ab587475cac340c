"""One file with all trajectories of a rank and its plain values, checked when it is read.

Does not decide what the values are or where the file lies.

Layout: safetensors. Every key of the schema is one array, the trajectories one after the other;
`prompt_lengths` and `response_lengths` say where each begins, and `routing_lengths` where its
expert ids do, if any trajectory has them. The metadata hold the values as JSON,
the schema's number and a BLAKE2b digest over arrays and values.
"""

import hashlib
import json
import os
import uuid
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from tensordict import TensorDict
from torch import Tensor

from rollverify.errors import CheckpointError
from rollverify.rollout.trajectory import (
    FIELDS,
    ROUTING,
    num_rows,
    single_value,
    validate_trajectory,
)

SCHEMA_VERSION = 3
"""Changes with the keys of a trajectory or the layout of the file."""

LENGTHS = {"prompt": "prompt_lengths", "response": "response_lengths"}
ROUTING_LENGTHS = "routing_lengths"
_OLDER = "delete its folder to resume from the checkpoint before"


def save_rank_file(path: Path, trajectories: list[TensorDict], values: dict[str, Any]) -> None:
    """Write the file; under its name there is always the old one or the whole new one.

    Args:
        path: file to write; its folder exists.
        trajectories: in the order in which they come back; may be empty.
        values: JSON values; keys are strings.

    Raises:
        CheckpointError: if it cannot be written.
        ValueError: if a trajectory is invalid.
    """
    for one in trajectories:
        validate_trajectory(one)
    arrays = _joined(trajectories)
    text = json.dumps(values)
    metadata = {"schema": str(SCHEMA_VERSION), "values": text, "digest": _digest(arrays, text)}
    # Ranks that hold the same may write the same file at the same time.
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with unfinished.open("wb") as file:
            file.write(save(arrays, metadata))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror}); make room for it, or choose another run "
            "folder"
        ) from error


def load_rank_file(path: Path) -> tuple[list[TensorDict], dict[str, Any]]:
    """Read what `save_rank_file` wrote.

    Args:
        path: file to read.

    Returns:
        (trajectories, values), as they were given.

    Raises:
        CheckpointError: if the file is missing, cut short, changed, of another schema, or holds a
            trajectory that is not valid.
    """
    arrays, metadata = _read(path)
    if metadata.get("schema") != str(SCHEMA_VERSION):
        raise CheckpointError(
            f"{path} has schema {metadata.get('schema')}, this version reads {SCHEMA_VERSION}; "
            "resume with the version that wrote it, or start a new run"
        )
    text = metadata.get("values", "")
    if metadata.get("digest") != _digest(arrays, text):
        raise CheckpointError(f"{path} is not as it was written (its digest differs); {_OLDER}")
    try:
        trajectories = _split(arrays)
        for one in trajectories:
            validate_trajectory(one)
    except (KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path} holds a wrong trajectory: {error}; {_OLDER}") from error
    return trajectories, json.loads(text)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; {_OLDER}") from error
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged or cut short ({error}); {_OLDER}") from error


def _sync_folder(folder: Path) -> None:
    """Make the new name last: a crash of the machine could bring the old one back."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _joined(trajectories: list[TensorDict]) -> dict[str, Tensor]:
    """One array per key, and the lengths."""
    arrays = {}
    for key, field in FIELDS.items():
        values = [one[key] for one in trajectories]
        empty = torch.zeros(0, dtype=field.dtype)
        arrays[key] = torch.cat([empty, *values]) if field.per else torch.stack(values or [empty])
    for per, name in LENGTHS.items():
        lengths = [len(one[f"{per}_ids"]) for one in trajectories]
        arrays[name] = torch.tensor(lengths, dtype=torch.int64)
    rows = [num_rows(one) for one in trajectories]
    if any(rows):
        arrays[ROUTING] = torch.cat([one[ROUTING] for one in trajectories if ROUTING in one])
        arrays[ROUTING_LENGTHS] = torch.tensor(rows, dtype=torch.int64)
    return arrays


def _split(arrays: dict[str, Tensor]) -> list[TensorDict]:
    """Undo `_joined`. Copies, so that no trajectory keeps the memory of all."""
    arrays = dict(arrays)
    routing, rows = arrays.pop(ROUTING, None), arrays.pop(ROUTING_LENGTHS, None)
    lengths = {per: arrays[name].tolist() for per, name in LENGTHS.items()}
    if not lengths["prompt"]:
        return []
    columns = {}
    for key in arrays.keys() - set(LENGTHS.values()):
        per = FIELDS[key].per
        columns[key] = (
            [part.clone() for part in arrays[key].split(lengths[per])]
            if per
            else [single_value(key, value) for value in arrays[key].tolist()]
        )
    trajectories = [
        TensorDict(dict(zip(columns, parts, strict=True)), [])
        for parts in zip(*columns.values(), strict=True)
    ]
    if routing is not None and rows is not None:
        for one, part in zip(trajectories, routing.split(rows.tolist()), strict=True):
            if len(part):
                one[ROUTING] = part.clone()
    return trajectories


def _digest(arrays: dict[str, Tensor], text: str) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for key in sorted(arrays):
        array = arrays[key]
        digest.update(f"{key} {array.dtype} {list(array.shape)}".encode())
        digest.update(array.numpy().data)
    return digest.hexdigest()
