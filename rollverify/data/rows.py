"""Rows of JSON lines, a JSON list, Parquet or a Hugging Face dataset, each with its place.

JSON is parsed here, line by line: the reader of `datasets` names no line in its errors, makes dates
of answers that look like dates, refuses integers above 64 bits, and takes twice as long.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollverify.errors import DataError

if TYPE_CHECKING:
    from pyarrow import DataType, Schema

logger = logging.getLogger(__name__)

EXAMPLE = '{"prompt": "...", "answer": "..."}'

FILE_SUFFIXES = (".jsonl", ".json", ".parquet")
"""Endings that make a text the name of a file even where there is none."""

_BATCH_ROWS = 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row and where it stands."""

    place: str
    """For messages: "file:LINE", or "file, row ROW" where there are no lines."""
    number: int
    """Line or row, from 1."""
    values: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class HubDataset:
    """One split of a dataset on the Hugging Face hub."""

    name: str
    subset: str = ""
    """Its configuration; "" takes the only one."""
    split: str = "train"
    revision: str = ""
    """Branch, tag or commit; "" takes the newest."""

    def __str__(self) -> str:
        parts = [f"subset {self.subset}"] * bool(self.subset) + [f"split {self.split}"]
        parts += [f"revision {self.revision}"] * bool(self.revision)
        return f"{self.name} ({', '.join(parts)})"


def read_rows(path: Path, needed: Sequence[str] = ()) -> Iterator[Row]:
    """Rows of a file in order, one after the other from the disk unless it is a JSON list.

    The ending .parquet means Parquet; a .json file that begins with "[" is one list; anything else
    has one JSON object per line, with no blank line but at the end. Parquet columns that hold bytes
    (images, sound) are left out, but for those that are `needed`.
    """
    ending = path.suffix.lower()
    try:
        if ending == ".parquet":
            yield from _parquet_rows(path, needed)
        elif ending == ".json" and _begins_with_bracket(path):
            yield from _list_rows(path)
        else:
            yield from _line_rows(path)
    except FileNotFoundError as error:
        raise DataError(
            f"prompt file {path} does not exist; check data.train and data.test"
        ) from error
    except OSError as error:
        raise DataError(
            f"cannot read prompt file {path}: {error.strerror}; give a readable JSON-lines file"
        ) from error


def _begins_with_bracket(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).removeprefix(_BYTE_ORDER_MARK).lstrip()[:1] == b"["


def _line_rows(path: Path) -> Iterator[Row]:
    offset = blank = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = _decoded(line, path, offset)
            offset += len(line)
            if not text or text.isspace():
                blank = blank or number
                continue
            if blank:
                raise DataError(f"{path}:{blank}: blank line; remove it")
            values = _parsed(text, path, number, "write one JSON object per line")
            yield _row(values, f"{path}:{number}", number)


def _list_rows(path: Path) -> Iterator[Row]:
    text = _decoded(path.read_bytes(), path, 0)
    rows = _parsed(text, path, None, "write one list of objects, or JSON lines")
    for number, values in enumerate(rows, start=1):
        yield _row(values, f"{path}, row {number}", number)


def _decoded(content: bytes, path: Path, offset: int) -> str:
    try:
        return content.decode("utf-8-sig" if offset == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text (byte {offset + error.start}); save it as UTF-8"
        ) from error


def _parsed(text: str, path: Path, line: int | None, cure: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{line or error.lineno}: not valid JSON ({error.msg}, column {error.colno}); "
            f"{cure}"
        ) from error
    except (ValueError, RecursionError) as error:  # numbers of > 4,300 digits, nesting too deep
        place = f"{path}:{line}" if line else path
        raise DataError(f"{place}: JSON too large to read; {cure}") from error


def _row(values: Any, place: str, number: int) -> Row:
    if not isinstance(values, dict):
        raise DataError(
            f"{place}: expected a JSON object, got {type(values).__name__}; write {EXAMPLE}"
        )
    return Row(place=place, number=number, values=values)


def _parquet_rows(path: Path, needed: Sequence[str]) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    path.open("rb").close()  # a missing file is not one that Parquet cannot read
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = _without_bytes(file.schema_arrow, needed)
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=names):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(place=f"{path}, row {number}", number=number, values=values)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0][:200]
        raise DataError(
            f"{path}: not readable as Parquet after {number} rows ({reason}); "
            "check that the file is complete"
        ) from error


def _without_bytes(schema: "Schema", needed: Sequence[str]) -> list[str]:
    kept = {*needed, *(name.partition(".")[0] for name in needed)}
    return [field.name for field in schema if field.name in kept or not _holds_bytes(field.type)]


def _holds_bytes(kind: "DataType") -> bool:
    if "binary" in str(kind) and not kind.num_fields:
        return True
    return any(_holds_bytes(kind.field(index).type) for index in range(kind.num_fields))


def read_hub_rows(
    dataset: HubDataset, needed: Sequence[str] = (), *, local_form: str
) -> Iterator[Row]:
    """Rows of a dataset in order; the log says beforehand what the hub is asked for.

    Columns of bytes are left out as in `read_rows`. `local_form`, for messages, is the setting that
    reads the same from a file.
    """
    from datasets import load_dataset  # takes a second, and may use the network

    logger.info(
        "asking the Hugging Face hub for %s, unless it is in its cache; to stay offline set %s",
        dataset,
        local_form,
    )
    try:
        table: Any = load_dataset(
            dataset.name,
            dataset.subset or None,
            split=dataset.split,
            revision=dataset.revision or None,
        )
        table = table.select_columns(_without_bytes(table.features.arrow_schema, needed))
    except Exception as error:  # the hub's client raises a great many classes, of several libraries
        reason = (str(error).splitlines() or [""])[0][:200]
        raise DataError(
            f"cannot get the dataset {dataset} from the Hugging Face hub "
            f"({type(error).__name__}: {reason}); check its name and the network, or set "
            f"{local_form}"
        ) from error
    number = 0
    for batch in table.iter(batch_size=_BATCH_ROWS):
        for values in zip(*batch.values(), strict=True):
            number += 1
            yield Row(
                place=f"{dataset}, row {number}",
                number=number,
                values=dict(zip(batch, values, strict=True)),
            )
