"""Digests of the files that DCP writes, which has none: a flipped bit is found before it is loaded.

Not of a rank's own part, which carries its digest itself. Which checkpoint is loaded is not decided
here.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rollverify.errors import CheckpointError

logger = logging.getLogger(__name__)

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
