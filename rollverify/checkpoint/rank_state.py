"""What one data rank alone holds of a run: its part of a checkpoint, and its return.

U_k and what waits for its group, the prompt ledger, prompts that came back, counters and the place
in the prompt stream. With another number of ranks everything is dealt out anew.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensordict import TensorDict

from rollverify.checkpoint.rank_file import load_rank_file, save_rank_file
from rollverify.checkpoint.redistribution import redistribute
from rollverify.data.loader import PromptLoader
from rollverify.errors import CheckpointError
from rollverify.rollout.buffer import TrajectoryBuffer
from rollverify.rollout.ledger import PromptLedger
from rollverify.rollout.prompt_queue import PromptQueue
from rollverify.rollout.rollouter import Rollouter
from rollverify.rollout.trajectory import is_finished

logger = logging.getLogger(__name__)
FILE_NAME = "rollout-{rank}.safetensors"


@dataclass(kw_only=True)
class RankState:
    """Saves and restores the objects of one data rank's rollouts."""

    loader: PromptLoader
    buffer: TrajectoryBuffer
    ledger: PromptLedger
    queue: PromptQueue
    rollouter: Rollouter
    max_response_tokens: int
    temperature: float
    data_rank: int
    data_world_size: int

    def save(self, folder: Path) -> None:
        """Write this rank's file into a checkpoint's folder.

        Ranks of one tensor-parallel group hold the same and write the same file.

        Raises:
            CheckpointError: if it cannot be written.
        """
        values = {
            "data_world_size": self.data_world_size,
            "temperature": self.temperature,
            "loader": self.loader.state_dict(),
            "buffer": self.buffer.state_dict(),
            "ledger": self.ledger.state_dict(),
            "queue": self.queue.state_dict(),
            "rollouter": self.rollouter.state_dict(),
        }
        path = folder / FILE_NAME.format(rank=self.data_rank)
        save_rank_file(path, self.buffer.trajectories(), values)

    def load(self, folder: Path) -> None:
        """Take back what `save` wrote, by however many ranks.

        Raises:
            CheckpointError: if a file is missing or damaged, or belongs to another run.
        """
        first = load_rank_file(folder / FILE_NAME.format(rank=0))
        num_saved = int(first[1]["data_world_size"])
        if first[1]["temperature"] != self.temperature:
            raise CheckpointError(
                f"the unfinished responses were sampled at rollout.temperature = "
                f"{first[1]['temperature']}, and log-probs belong to it; resume with the same"
            )
        self.loader.load_state_dict(first[1]["loader"])
        if num_saved == self.data_world_size:
            own = self.data_rank
            part = load_rank_file(folder / FILE_NAME.format(rank=own)) if own else first
            num_drawn = int(part[1]["loader"]["num_drawn"])
        else:
            others = range(1, num_saved)
            parts = [first, *(load_rank_file(folder / FILE_NAME.format(rank=r)) for r in others)]
            part = redistribute(
                parts,
                data_rank=self.data_rank,
                data_world_size=self.data_world_size,
                prompt_index_of=self.loader.index_at,
            )
            num_drawn = int(part[1]["num_drawn"])
            logger.info(
                "%d data ranks wrote the checkpoint; dealt out over %d",
                num_saved,
                self.data_world_size,
            )
        self.loader.seek(num_drawn)
        self._restore(*part)

    def _restore(self, trajectories: list[TensorDict], values: dict[str, Any]) -> None:
        self.buffer.load_state_dict(values["buffer"])
        groups: dict[int, list[TensorDict]] = {}
        for one in trajectories:
            self._check_length(one)
            groups.setdefault(int(one["group_id"]), []).append(one)
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
        size, limit = len(trajectory["response_ids"]), self.max_response_tokens
        if not is_finished(trajectory) and size >= limit:
            raise CheckpointError(
                f"the checkpoint holds an unfinished response of {size} tokens and "
                f"rollout.max_response_tokens is {limit}; resume with at least {size + 1}"
            )
