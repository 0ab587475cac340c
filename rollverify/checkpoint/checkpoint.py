"""Save and resume a run: each rank's own part, then model, optimizer, schedule and loop (DCP).

A checkpoint is complete once DCP has written its `.metadata`, which it does last; only complete
ones are ever loaded, and a run that dies inside a save resumes from the one before. Then come the
digests of its files. What a rank's own part holds is not decided here.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from rollverify.errors import CheckpointError
from rollverify.ranks import from_rank_0, on_every_rank, one_line, rank_and_size

DIGEST_FILE = "digests.json"
METADATA_FILE = ".metadata"


def digests_of_rank(folder: Path, rank: int) -> dict[str, str]:
    """Read back what a rank has just written, in pieces; most of it is still in memory.

    Args:
        folder: of a complete checkpoint.
        rank: global rank; rank 0 has written the metadata, too.

    Returns:
        BLAKE2b digest (128 bits, hexadecimal) by file name.

    Raises:
        OSError: if a file cannot be read.
    """
    files = sorted(folder.glob(f"__{rank}_*.distcp"))
    if rank == 0:
        files.append(folder / METADATA_FILE)
    return {file.name: _digest(file) for file in files}


def write_digests(folder: Path, parts: Sequence[Mapping[str, str]]) -> None:
    """Write `digests.json` in one move. Call on one rank.

    Args:
        folder: of a complete checkpoint.
        parts: digests by file name, of each rank.

    Raises:
        OSError: if it cannot be written.
    """
    merged = {name: digest for part in parts for name, digest in part.items()}
    draft = folder / f".{DIGEST_FILE}"
    with draft.open("w", encoding="utf-8") as file:
        json.dump(merged, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(folder / DIGEST_FILE)


def check_digests(folder: Path, rank: int, num_ranks: int) -> None:
    """Compare this rank's share of the files with their digests.

    A checkpoint without digests is taken as it is, and that is said: it is what a kill leaves
    between the last file and the digests, and as good as any.

    Args:
        folder: of a complete checkpoint, written by any number of ranks.
        rank: global rank.
        num_ranks: the files are dealt out over so many; all call this.

    Raises:
        CheckpointError: if a file is missing, cannot be read or is not as it was written.
    """
    cure = f"delete {folder} to resume from the checkpoint before"
    try:
        text = (folder / DIGEST_FILE).read_text(encoding="utf-8")
        expected: dict[str, str] = json.loads(text)
        names = sorted(expected)[rank::num_ranks]
    except FileNotFoundError:
        if rank == 0:
            logger.warning("%s has no %s, so its data are not checked", folder, DIGEST_FILE)
        return
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{folder / DIGEST_FILE} is damaged ({type(error).__name__}); {cure}, or delete only "
            "that file to resume unchecked"
        ) from error
    for name in names:
        file = folder / name
        try:
            is_same = _digest(file) == expected[name]
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read ({error.strerror}); {cure}") from error
        if not is_same:
            raise CheckpointError(f"{file} is not as it was written (its digest differs); {cure}")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16)).hexdigest()


logger = logging.getLogger(__name__)

SCHEMA_VERSION = 2
COMPLETE_FILE = METADATA_FILE
_STEP_FOLDER = re.compile(r"step-(\d+)")


_READ_ERRORS = (CheckpointException, OSError, RuntimeError, ValueError, KeyError, EOFError)
"""What DCP raises on a damaged checkpoint; the first is no `Exception`, so it is easy to miss."""


def complete_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints below a checkpoint folder, ascending."""
    if not folder.is_dir():
        return []
    return sorted(
        int(match.group(1))
        for entry in folder.iterdir()
        if (match := _STEP_FOLDER.fullmatch(entry.name)) and (entry / COMPLETE_FILE).is_file()
    )


class Checkpointer(Protocol):
    """torchtitan's checkpoint manager, as far as it is used here."""

    states: dict[str, Any]

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Write `step-N`. Collective."""
        ...

    def load(self, step: int = -1) -> bool:
        """Read `step-N`. Collective."""
        ...


class LoopState(Stateful):
    """The loop's own state as one JSON text inside the checkpoint.

    One text, because DCP reads back only keys that it finds in the state it is given, and lists in
    here change their length.
    """

    def __init__(
        self, collect: Callable[[], dict[str, Any]], restore: Callable[[dict[str, Any]], None]
    ) -> None:
        """Keep the two callbacks.

        Args:
            collect: JSON-able values, the same on every rank.
            restore: takes them back.
        """
        self._collect = collect
        self._restore = restore

    def state_dict(self) -> dict[str, Any]:
        """For DCP."""
        return {"json": json.dumps({"schema": SCHEMA_VERSION, **self._collect()})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """For DCP.

        Raises:
            CheckpointError: if the state was written under another schema.
        """
        values = json.loads(state_dict["json"])
        schema = values.pop("schema", None)
        if schema != SCHEMA_VERSION:
            raise CheckpointError(
                f"the checkpoint has schema {schema}, this version reads {SCHEMA_VERSION}; resume "
                "with the version that wrote it, or start a new run"
            )
        self._restore(values)


class RunCheckpoint:
    """Checkpoints of one run folder. All methods are collective over the world."""

    def __init__(
        self,
        *,
        folder: Path,
        checkpointer: Checkpointer,
        model_shapes: Callable[[], dict[str, tuple[int, ...]]],
        loop_state: LoopState,
        save_rank: Callable[[Path], None],
        load_rank: Callable[[Path], None],
        keep: int,
        rank: int,
    ) -> None:
        """Add the loop's state to what torchtitan saves.

        Args:
            folder: holds `step-N` folders.
            checkpointer: writes and reads them.
            model_shapes: parameter shapes of this run's model, by name.
            loop_state: the loop's own state.
            save_rank: called on every rank; writes what only this rank holds into the folder of
                the step. Not a collective.
            load_rank: called on every rank, after all else is loaded; takes it back from there,
                whatever the number of ranks was.
            keep: complete checkpoints to keep, >= 1.
            rank: global rank; rank 0 deletes old ones.
        """
        self._folder = folder
        self._checkpointer = checkpointer
        self._model_shapes = model_shapes
        self._save_rank = save_rank
        self._load_rank = load_rank
        self._keep = keep
        self._rank = rank
        checkpointer.states["loop"] = loop_state

    def save(self, step: int) -> None:
        """Write `step-N`, then delete what is older than the newest `keep`.

        A complete checkpoint of the step is left as it is: it was loaded, and no step taken since.

        Args:
            step: steps taken.

        Raises:
            CheckpointError: on every rank, if one of them cannot write.
        """
        path = self._folder / f"step-{step}"
        is_complete = from_rank_0(step in complete_steps(self._folder))
        if is_complete:
            logger.info("%s is complete already", path)
            return
        if self._rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        if dist.is_initialized():
            dist.barrier()
        on_every_rank(lambda: self._write_rank(path))
        try:
            self._checkpointer.save(step)
        except (OSError, CheckpointException) as error:
            raise self._cannot_write(error) from error
        self._write_digests(path)
        if self._rank == 0:
            self._delete_old(step)

    def save_in_flight(self, step: int) -> None:
        """Keep what the ranks hold beyond a step that may be saved already.

        The part of each rank is replaced as a whole and holds no reference to another's, so a
        complete checkpoint stays complete whenever this ends.

        Args:
            step: steps taken.

        Raises:
            CheckpointError: on every rank, if one of them cannot write.
        """
        path = self._folder / f"step-{step}"
        if from_rank_0(step in complete_steps(self._folder)):
            on_every_rank(lambda: self._write_rank(path))
        else:
            self.save(step)

    def _write_rank(self, path: Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._save_rank(path)
        except OSError as error:
            raise self._cannot_write(error) from error

    def _write_digests(self, path: Path) -> None:
        rank, _ = rank_and_size()
        parts = on_every_rank(lambda: digests_of_rank(path, rank))
        try:
            on_every_rank(lambda: write_digests(path, parts) if rank == 0 else None)
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: BaseException) -> CheckpointError:
        return CheckpointError(
            f"{self._folder} cannot be written ({one_line(error)}); free space or choose another "
            "run.output_dir"
        )

    def _delete_old(self, newest: int) -> None:
        kept = complete_steps(self._folder)[-self._keep :]
        for entry in self._folder.iterdir():
            match = _STEP_FOLDER.fullmatch(entry.name)
            if match and int(match.group(1)) not in kept and int(match.group(1)) <= newest:
                shutil.rmtree(entry, ignore_errors=True)

    def load_latest(self, last_step: int) -> int:
        """Load the newest complete checkpoint.

        Args:
            last_step: step at which the run is to end.

        Returns:
            Its step.

        Raises:
            CheckpointError: if there is none, it lies beyond the last step, belongs to another
                model, or is damaged; for damage in the part of one rank on every rank.
        """
        steps = complete_steps(self._folder)
        if not steps:
            raise CheckpointError(
                f"{self._folder} holds no complete checkpoint; start a new run without --resume"
            )
        path = self._folder / f"step-{steps[-1]}"
        if steps[-1] > last_step:
            raise CheckpointError(
                f"{path} lies beyond training.steps = {last_step}; resume with at least {steps[-1]}"
            )
        on_every_rank(lambda: check_digests(path, *rank_and_size()))
        self._check_model(path)
        try:
            self._checkpointer.load(steps[-1])
        except CheckpointError:
            raise
        except _READ_ERRORS as error:
            raise CheckpointError(
                f"{path} cannot be read ({one_line(error)}); delete it to resume from the one "
                "before"
            ) from error
        on_every_rank(lambda: self._load_rank(path))
        logger.info("resumed from %s", path)
        return steps[-1]

    def _check_model(self, path: Path) -> None:
        """Compare parameter names and shapes before anything is overwritten."""
        try:
            saved = FileSystemReader(path).read_metadata().state_dict_metadata
        except Exception as error:  # Pickled metadata of a damaged file can raise anything.
            raise CheckpointError(
                f"{path}/{COMPLETE_FILE} is damaged ({type(error).__name__}); delete {path} to "
                "resume from the checkpoint before"
            ) from error
        for name, shape in self._model_shapes().items():
            entry = saved.get(name)
            found = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
            if found != shape:
                raise CheckpointError(
                    f"{path} belongs to another model: {name} is {found or 'missing'} there and "
                    f"{shape} in this run; resume with the model it was trained from"
                )


class Checkpointing:
    """Saves every so many steps and after the last one, each step once."""

    def __init__(self, *, save: Callable[[int], None], every_steps: int, last_step: int) -> None:
        """Set up.

        Args:
            save: writes the checkpoint of a step; collective.
            every_steps: steps between checkpoints; 0 never saves.
            last_step: saved in any case, unless `every_steps` is 0.
        """
        self._save = save
        self._every_steps = every_steps
        self._last_step = last_step
        self.saved_step = 0
        """Newest step saved by this process; 0 for none."""

    def is_due(self, step: int) -> bool:
        """Whether the step is to be saved; the same on every rank."""
        if not self._every_steps:
            return False
        return step % self._every_steps == 0 or step == self._last_step

    def save(self, step: int) -> None:
        """Save now, unless this step is saved. Collective: yes, over the world."""
        if step != self.saved_step:
            self._save(step)
            self.saved_step = step
