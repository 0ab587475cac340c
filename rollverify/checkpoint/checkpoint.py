"""Save and resume a run: each rank's own part, then model, optimizer, schedule and loop (DCP).

A checkpoint is complete once DCP has written its `.metadata`, which it does last; only complete
ones are loaded, so a run that dies inside a save resumes from the one before. Then come digests.
"""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from rollverify.errors import CheckpointError
from rollverify.files import write_atomic
from rollverify.ranks import Ranks, one_line

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 2
DIGEST_FILE = "digests.json"
COMPLETE_FILE = ".metadata"
_STEP_FOLDER = re.compile(r"step-(\d+)")

_READ_ERRORS = (CheckpointException, OSError, RuntimeError, ValueError, KeyError, EOFError)
"""What DCP raises on a damaged checkpoint; the first is no `Exception`, so it is easy to miss."""


def digests_of_rank(folder: Path, rank: int) -> dict[str, str]:
    """BLAKE2b (128 bits, hexadecimal) by name of the files a rank has just written."""
    files = sorted(folder.glob(f"__{rank}_*.distcp"))
    if rank == 0:
        files.append(folder / COMPLETE_FILE)
    return {file.name: _digest(file) for file in files}


def write_digests(folder: Path, parts: Sequence[Mapping[str, str]]) -> None:
    """Write the digests of each rank's files. Call on one rank."""
    merged = {name: digest for part in parts for name, digest in part.items()}
    write_atomic(folder / DIGEST_FILE, json.dumps(merged, indent=1, sort_keys=True))


def check_digests(folder: Path, rank: int, num_ranks: int) -> None:
    """Compare this rank's share of a complete checkpoint's files with their digests.

    Without digests it is taken as it is, with a warning: that is what a kill leaves between the
    last file and the digests. Any number of ranks may have written it.
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


def complete_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints below a checkpoint folder, ascending."""
    if not folder.is_dir():
        return []
    return sorted(
        int(match[1])
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

    def maybe_wait_for_saving(self) -> None:
        """Return once what is written in the background is written; raise if it failed."""
        ...


@dataclass(kw_only=True)
class LoopState(Stateful):
    """The loop's own state as one JSON text inside the checkpoint.

    DCP reads back only keys that it finds in the state it is given; lists in here change length.
    """

    collect: Callable[[], dict[str, Any]]
    """JSON values, the same on every rank."""

    restore: Callable[[dict[str, Any]], None]

    def state_dict(self) -> dict[str, Any]:
        """For DCP."""
        return {"json": json.dumps({"schema": SCHEMA_VERSION, **self.collect()})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """For DCP."""
        values = json.loads(state_dict["json"])
        schema = values.pop("schema", None)
        if schema != SCHEMA_VERSION:
            raise CheckpointError(
                f"the checkpoint has schema {schema}, this version reads {SCHEMA_VERSION}; resume "
                "with the version that wrote it, or start a new run"
            )
        self.restore(values)


@dataclass(kw_only=True)
class RunCheckpoint:
    """Checkpoints of one run folder. All methods are collective over the world."""

    folder: Path
    """Holds `step-N` folders."""

    checkpointer: Checkpointer
    model_shapes: Callable[[], dict[str, tuple[int, ...]]]
    """By parameter name."""

    loop_state: LoopState
    save_rank: Callable[[Path], None]
    """Writes what only this rank holds into the folder of the step."""

    load_rank: Callable[[Path], None]
    """Takes it back after all else is loaded, whatever the number of ranks was."""

    keep: int
    """Complete checkpoints, >= 1."""

    world: Ranks
    in_background: bool = False
    """Whether `save` returns once everything is copied, and `finish` waits until it is written."""

    _unfinished: int | None = field(default=None, init=False)
    """Step that is being written."""

    def __post_init__(self) -> None:
        self.checkpointer.states["loop"] = self.loop_state

    def save(self, step: int) -> None:
        """Write `step-N`, then delete what is older than the newest `keep`.

        A complete checkpoint of the step is left as it is: it was loaded, and no step taken since.
        What is still being written of the one before is finished first.
        """
        self.finish()
        path = self.folder / f"step-{step}"
        if self._is_complete(step):
            logger.info("%s is complete already", path)
            return
        self._on_first(lambda: shutil.rmtree(path, ignore_errors=True))
        self.world.agree(lambda: self._write_rank(path))
        try:
            self.checkpointer.save(step)
        except (OSError, CheckpointException) as error:
            raise self._cannot_write(error) from error
        self._unfinished = step
        if not self.in_background:
            self.finish()

    def finish(self) -> None:
        """Wait until the last step saved is written, add its digests, delete what is older.

        A kill before leaves it without digests, or the checkpoint before as the newest complete.
        """
        step, self._unfinished = self._unfinished, None
        if step is None:
            return
        path = self.folder / f"step-{step}"
        try:
            self.checkpointer.maybe_wait_for_saving()
            parts = self.world.agree(lambda: digests_of_rank(path, self.world.rank))
            self._on_first(lambda: write_digests(path, parts))
        except (OSError, CheckpointException) as error:
            raise self._cannot_write(error) from error
        if self.world.rank == 0:
            self._delete_old(step)

    def save_in_flight(self, step: int) -> None:
        """Keep what the ranks hold beyond a step that may be saved already.

        The part of each rank is replaced as a whole and holds no reference to another's, so a
        complete checkpoint stays complete whenever this ends. Nothing is left to `finish`.
        """
        self.finish()
        if self._is_complete(step):
            self.world.agree(lambda: self._write_rank(self.folder / f"step-{step}"))
        else:
            self.save(step)
            self.finish()

    def _is_complete(self, step: int) -> bool:
        """As rank 0 sees it: others may see a shared folder late."""
        return self.world.from_first(step in complete_steps(self.folder))

    def _on_first(self, action: Callable[[], None]) -> None:
        """Run on rank 0 while the others wait."""
        self.world.agree(action if self.world.rank == 0 else lambda: None)

    def _write_rank(self, path: Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            self.save_rank(path)
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: BaseException) -> CheckpointError:
        return CheckpointError(
            f"{self.folder} cannot be written ({_reason(error)}); free space or choose another "
            "run.output_dir"
        )

    def _delete_old(self, newest: int) -> None:
        kept = complete_steps(self.folder)[-self.keep :]
        for entry in self.folder.iterdir():
            match = _STEP_FOLDER.fullmatch(entry.name)
            if match and int(match[1]) not in kept and int(match[1]) <= newest:
                shutil.rmtree(entry, ignore_errors=True)

    def load_latest(self, last_step: int) -> int:
        """Load the newest complete checkpoint, not beyond `last_step`; return its step."""
        steps = complete_steps(self.folder)
        if not steps:
            raise CheckpointError(
                f"{self.folder} holds no complete checkpoint; start a new run without --resume"
            )
        path = self.folder / f"step-{steps[-1]}"
        if steps[-1] > last_step:
            raise CheckpointError(
                f"{path} lies beyond training.steps = {last_step}; resume with at least {steps[-1]}"
            )
        self.world.agree(lambda: check_digests(path, self.world.rank, self.world.size))
        self._check_model(path)
        try:
            self.checkpointer.load(steps[-1])
        except CheckpointError:
            raise
        except _READ_ERRORS as error:
            raise CheckpointError(
                f"{path} cannot be read ({_reason(error)}); delete it to resume from the one before"
            ) from error
        self.world.agree(lambda: self.load_rank(path))
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
        for name, shape in self.model_shapes().items():
            entry = saved.get(name)
            found = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
            if found != shape:
                raise CheckpointError(
                    f"{path} belongs to another model: {name} is {found or 'missing'} there and "
                    f"{shape} in this run; resume with the model it was trained from"
                )


def _reason(error: BaseException) -> str:
    """What was wrong; where DCP has collected the failures of all ranks, the first of them."""
    if isinstance(error, CheckpointException):
        error = next((failure for failure, _ in error.failures.values()), error)
    return one_line(error)


@dataclass(kw_only=True)
class Checkpointing:
    """Saves every so many steps and after the last one, each step once."""

    save_step: Callable[[int], None]
    """Collective."""

    every_steps: int
    """0 never saves."""

    last_step: int
    """Saved in any case, unless `every_steps` is 0."""

    saved_step: int = field(default=0, init=False)
    """Newest of this process; 0 for none."""

    def is_due(self, step: int) -> bool:
        """Whether the step is to be saved; the same on every rank."""
        if not self.every_steps:
            return False
        return step % self.every_steps == 0 or step == self.last_step

    def save(self, step: int) -> None:
        """Save now, unless this step is saved. Collective over the world."""
        if step != self.saved_step:
            self.save_step(step)
            self.saved_step = step
