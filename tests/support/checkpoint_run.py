"""A run of one layer, a counting loop and a part of each rank, with checkpoints in real files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from rollverify.checkpoint.checkpoint import LoopState, RunCheckpoint
from rollverify.ranks import Ranks


class TinyCheckpointer:
    """Writes `step-N` folders as torchtitan does: parameters at the top, other states beside."""

    def __init__(
        self, folder: Path, model: torch.nn.Module, *, in_background: bool = False
    ) -> None:
        self.states: dict[str, Any] = {}
        self.in_background = in_background
        self.future: Any = None
        self._folder = folder
        self._model = model

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        del last_step
        state = {**self._model.state_dict(), **self.states}
        path = self._folder / f"step-{curr_step}"
        if self.in_background:
            self.future = dcp.async_save(state, checkpoint_id=path)
        else:
            dcp.save(state, checkpoint_id=path)
        return True

    def maybe_wait_for_saving(self) -> None:
        future, self.future = self.future, None
        if future is not None:
            future.result()

    def load(self, step: int = -1) -> bool:
        # Tensors are filled in place, stateful objects through load_state_dict.
        state = {**self._model.state_dict(), **self.states}
        dcp.load(state, checkpoint_id=self._folder / f"step-{step}")
        return True


class FakeRun:
    """A model of one layer, a loop that counts, and what only this rank holds."""

    def __init__(
        self,
        folder: Path,
        *,
        width: int = 3,
        keep: int = 2,
        rank: int = 0,
        in_background: bool = False,
    ) -> None:
        self.model = torch.nn.Linear(width, 2)
        self.loop: dict[str, Any] = {"drawn": 0, "list": []}
        self.own: dict[str, Any] = {}
        """The part of this rank."""
        self.folder = folder
        self.rank = rank
        self.checkpointer = TinyCheckpointer(folder, self.model, in_background=in_background)
        self.checkpoint = RunCheckpoint(
            folder=folder,
            checkpointer=self.checkpointer,
            model_shapes=lambda: {k: tuple(v.shape) for k, v in self.model.state_dict().items()},
            loop_state=LoopState(
                collect=lambda: self.loop, restore=lambda values: self.loop.update(values)
            ),
            save_rank=lambda path: self.save_rank(path),
            load_rank=lambda path: self.load_rank(path),
            keep=keep,
            in_background=in_background,
            world=replace(Ranks.world(), rank=rank),
        )

    def save_rank(self, path: Path) -> None:
        (path / f"rank-{self.rank}.json").write_text(json.dumps(self.own))

    def load_rank(self, path: Path) -> None:
        self.own = json.loads((path / f"rank-{self.rank}.json").read_text())


def flip_a_bit(file: Path) -> None:
    """In the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
