"""Files that appear complete or not at all."""

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_atomic(
    path: str | os.PathLike[str], content: str | bytes | Callable[[BinaryIO], object]
) -> None:
    """Write or replace a file in one move that outlasts a crash of the machine.

    A missing folder is made; permissions follow the umask. Of several processes that write the same
    path at once the last wins. `content` is text (UTF-8, newlines as they are), bytes, or what
    writes them to the open file. After an error an older file stays, and nothing else is left.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with part.open("xb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make the new name last: a crash of the machine could bring the old one back."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
