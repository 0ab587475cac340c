"""What one data rank alone holds of a run: its file in a checkpoint, and its return.

Layout: safetensors. Every key of a trajectory is one array, the trajectories one after the other;
`prompt_lengths` and `response_lengths` say where each begins, `routing_lengths` where its expert
ids do, if any has them. The metadata hold the values (ledger, queue, counters, place in the stream)
as JSON, the schema's number and a BLAKE2b digest over arrays and values.
"""

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from tensordict import TensorDict
from torch import Tensor

from rollverify.checkpoint.redistribute import redistribute
from rollverify.config.tables import RolloutConfig
from rollverify.data.loader import PromptLoader
from rollverify.errors import CheckpointError
from rollverify.files import write_atomic
from rollverify.ranks import Ranks
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.ledger import PromptLedger
from rollverify.rollout.prompt_queue import PromptQueue
from rollverify.rollout.rollouter import Rollouter
from rollverify.rollout.trajectory import (
    FIELDS,
    ROUTING,
    is_finished,
    num_rows,
    single_value,
    validate_trajectory,
)

logger = logging.getLogger(__name__)

FILE_NAME = "rollout-{rank}.safetensors"
SCHEMA_VERSION = 3
"""Changes with the keys of a trajectory or the layout of the file."""

LENGTHS = {"prompt": "prompt_lengths", "response": "response_lengths"}
ROUTING_LENGTHS = "routing_lengths"
_OLDER = "delete its folder to resume from the checkpoint before"


def save_rank_file(path: Path, trajectories: list[TensorDict], values: dict[str, Any]) -> None:
    """Write trajectories and JSON values; under the name is the old file or the whole new one."""
    for trajectory in trajectories:
        validate_trajectory(trajectory)
    arrays = _joined(trajectories)
    text = json.dumps(values)
    metadata = {"schema": str(SCHEMA_VERSION), "values": text, "digest": _digest(arrays, text)}
    try:
        # Ranks that hold the same may write the same file at the same time.
        write_atomic(path, save(arrays, metadata))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror}); make room for it, or choose another run "
            "folder"
        ) from error


def load_rank_file(path: Path) -> tuple[list[TensorDict], dict[str, Any]]:
    """Read what `save_rank_file` wrote; a damaged file is a CheckpointError."""
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
        for trajectory in trajectories:
            validate_trajectory(trajectory)
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


def _joined(trajectories: list[TensorDict]) -> dict[str, Tensor]:
    """One array per key, and the lengths."""
    arrays = {}
    for key, field in FIELDS.items():
        values = [trajectory[key] for trajectory in trajectories]
        empty = torch.zeros(0, dtype=field.dtype)
        arrays[key] = torch.cat([empty, *values]) if field.per else torch.stack(values or [empty])
    for per, name in LENGTHS.items():
        lengths = [len(trajectory[f"{per}_ids"]) for trajectory in trajectories]
        arrays[name] = torch.tensor(lengths, dtype=torch.int64)
    rows = list(map(num_rows, trajectories))
    if any(rows):
        arrays[ROUTING] = torch.cat([t[ROUTING] for t in trajectories if ROUTING in t])
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
        for trajectory, part in zip(trajectories, routing.split(rows.tolist()), strict=True):
            if len(part):
                trajectory[ROUTING] = part.clone()
    return trajectories


def _digest(arrays: dict[str, Tensor], text: str) -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for key in sorted(arrays):
        array = arrays[key]
        digest.update(f"{key} {array.dtype} {list(array.shape)}".encode())
        digest.update(array.numpy().data)
    return digest.hexdigest()


@dataclass(kw_only=True)
class RankState:
    """Saves and restores the objects of one data rank's rollouts."""

    loader: PromptLoader
    buffer: TrajectoryBuffer
    ledger: PromptLedger
    queue: PromptQueue
    rollouter: Rollouter
    rollout: RolloutConfig
    ranks: Ranks

    def save(self, folder: Path) -> None:
        """Write this rank's file; ranks of one tensor-parallel group hold and write the same."""
        values = {
            "data_world_size": self.ranks.size,
            "temperature": self.rollout.temperature,
            "loader": self.loader.state_dict(),
            "buffer": self.buffer.state_dict(),
            "ledger": self.ledger.state_dict(),
            "queue": self.queue.state_dict(),
            "rollouter": self.rollouter.state_dict(),
        }
        path = folder / FILE_NAME.format(rank=self.ranks.rank)
        save_rank_file(path, self.buffer.trajectories(), values)

    def load(self, folder: Path) -> None:
        """Take back what `save` wrote, by however many ranks."""
        first = load_rank_file(folder / FILE_NAME.format(rank=0))
        num_saved = int(first[1]["data_world_size"])
        if first[1]["temperature"] != self.rollout.temperature:
            raise CheckpointError(
                f"the unfinished responses were sampled at rollout.temperature = "
                f"{first[1]['temperature']}, and log-probs belong to it; resume with the same"
            )
        self.loader.load_state_dict(first[1]["loader"])
        if num_saved == self.ranks.size:
            own = self.ranks.rank
            part = load_rank_file(folder / FILE_NAME.format(rank=own)) if own else first
            num_drawn = int(part[1]["loader"]["num_drawn"])
        else:
            others = range(1, num_saved)
            parts = [first, *(load_rank_file(folder / FILE_NAME.format(rank=r)) for r in others)]
            part = redistribute(parts, self.ranks, self.loader.index_at)
            num_drawn = int(part[1]["num_drawn"])
            logger.info(
                "%d data ranks wrote the checkpoint; dealt out over %d",
                num_saved,
                self.ranks.size,
            )
        self.loader.seek(num_drawn)
        self._restore(*part)

    def _restore(self, trajectories: list[TensorDict], values: dict[str, Any]) -> None:
        self.buffer.load_state_dict(values["buffer"])
        groups: dict[int, list[TensorDict]] = {}
        for trajectory in trajectories:
            self._check_length(trajectory)
            groups.setdefault(int(trajectory["group_id"]), []).append(trajectory)
        for members in groups.values():
            try:
                self.buffer.add_group(members)
            except ValueError as error:
                raise CheckpointError(
                    f"the saved trajectories do not fit this run: {error}; resume with the same "
                    "rollout.group_size, or start a new run"
                ) from error
        self.ledger.load_state_dict(values["ledger"])
        self.queue.load_state_dict(values["queue"])
        self.rollouter.load_state_dict(values["rollouter"])

    def _check_length(self, trajectory: TensorDict) -> None:
        """A response under way must leave room for a token."""
        size, limit = len(trajectory["response_ids"]), self.rollout.max_response_tokens
        if not is_finished(trajectory) and size >= limit:
            raise CheckpointError(
                f"the checkpoint holds an unfinished response of {size} tokens and "
                f"rollout.max_response_tokens is {limit}; resume with at least {size + 1}"
            )
