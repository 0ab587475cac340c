"""Rows of a local file: JSON lines, a JSON list, or Parquet. Every bad file gives one line.

A row is a plain dict; what its columns mean is decided in `columns.py`. Files are read as a stream,
a JSON list excepted. pyarrow is imported only for Parquet.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollverify.errors import DataError

Row = dict[str, Any]

EXAMPLE = '{"prompt": "...", "answer": "..."}'

FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
"""Endings that make a text the name of a file even where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedRow:
    """A row and where it stands."""

    place: str
    """For messages: "file:LINE", or "file, row ROW" where there are no lines."""
    number: int
    """Line or row, from 1."""
    values: Row
    """Column name -> value."""
    columns: Sequence[str] = ()
    """All columns of the table, where `values` holds but a part of them."""


def read_rows(path: Path, columns: Sequence[str]) -> Iterator[PlacedRow]:
    """Rows of a file in order.

    The ending .parquet means Parquet; a .json file that begins with "[" is one list; anything
    else has one JSON object per line, with no blank line but at the end.

    Args:
        path: the file.
        columns: names that will be asked for, of which a Parquet file is read no more; a dotted
            name is looked for inside the column before the dot.

    Yields:
        Each row; none at all for an empty file.

    Raises:
        DataError: one line naming the file, the line and the cure, if it is missing or cannot be
            read, or a line is not a JSON object.
    """
    ending = path.suffix.lower()
    if ending == ".parquet":
        return _parquet_rows(path, columns)
    if ending == ".json" and _first_bytes(path).lstrip()[:1] == b"[":
        return _list_rows(path)
    return _line_rows(path)


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(64).removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    if isinstance(error, FileNotFoundError):
        return DataError(f"prompt file {path} does not exist; check data.train and data.test")
    return DataError(
        f"cannot read prompt file {path}: {error.strerror}; give a readable JSON-lines file"
    )


def _line_rows(path: Path) -> Iterator[PlacedRow]:
    blank = 0
    try:
        with path.open("rb") as file:
            offset = 0
            for number, line in enumerate(file, start=1):
                text = _decoded(line, path, offset)
                offset += len(line)
                if not text.strip():
                    blank = blank or number
                    continue
                if blank:
                    raise DataError(f"{path}:{blank}: blank line; remove it")
                place = f"{path}:{number}"
                yield PlacedRow(place=place, number=number, values=_object_of(text, place))
    except OSError as error:
        raise _unreadable(path, error) from error


def _decoded(line: bytes, path: Path, offset: int) -> str:
    try:
        return line.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text (byte {offset + error.start}); save it as UTF-8"
        ) from error


def _object_of(text: str, place: str) -> Row:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{place}: not valid JSON ({error.msg}, column {error.colno}); "
            "write one JSON object per line"
        ) from error
    except (ValueError, RecursionError) as error:  # numbers of > 4,300 digits, nesting too deep
        raise DataError(
            f"{place}: JSON too large to read; write one flat object per line"
        ) from error
    return _checked(row, place)


def _checked(row: Any, place: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(
            f"{place}: expected a JSON object, got {type(row).__name__}; write {EXAMPLE}"
        )
    return row


def _list_rows(path: Path) -> Iterator[PlacedRow]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    text = _decoded(content, path, 0)
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{error.lineno}: not valid JSON ({error.msg}, column {error.colno}); "
            "write one list of objects, or JSON lines"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: JSON too large to read; write JSON lines") from error
    for number, row in enumerate(rows, start=1):
        place = f"{path}, row {number}"
        yield PlacedRow(place=place, number=number, values=_checked(row, place))


def _parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[PlacedRow]:
    _first_bytes(path)
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            f"{path}: reading Parquet needs pyarrow, which is not installed; run "
            "pip install 'rollverify[data]', or give JSON lines"
        ) from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            wanted = top_columns(columns, names)
            for batch in file.iter_batches(batch_size=1024, columns=wanted or None):
                for row in batch.to_pylist():
                    number += 1
                    place = f"{path}, row {number}"
                    yield PlacedRow(place=place, number=number, values=row, columns=names)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0][:200]
        raise DataError(
            f"{path}: not readable as Parquet after {number} rows ({reason}); "
            "check that the file is complete"
        ) from error


def top_columns(columns: Sequence[str], present: Sequence[str]) -> list[str]:
    """Those columns of a table that hold what is asked for.

    Args:
        columns: names, dotted ones for values inside a column.
        present: columns of the table.

    Returns:
        A part of `present`, in its order.
    """
    tops = {name if name in present else name.partition(".")[0] for name in columns}
    return [name for name in present if name in tops]
