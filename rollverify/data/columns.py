"""From a row to prompt, answer and id: which columns hold them and how an answer is written."""

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from rollverify.data.rows import Row
from rollverify.errors import DataError

AnswerFormat = Literal["text", "integer", "hashes"]

_MISSING = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Names of columns; the first that a row has counts; "extra_info.index" looks inside one."""

    prompt: tuple[str, ...] = ("prompt",)
    """The problem: text, or a conversation of one user message."""
    answer: tuple[str, ...] = ("answer",)
    """What the reward compares with."""
    id: tuple[str, ...] = ("id",)
    """A text or integer; where a row has none, its line or row number is taken."""
    requires_id: bool = False
    """Whether a row without id is refused instead."""
    setting: str = "data.train_columns"

    def names(self) -> list[str]:
        """Every name."""
        return [*self.prompt, *self.answer, *self.id]


def prompt_of(row: Row, columns: Columns) -> str:
    """Text of the problem: a text, or a conversation of exactly one user message."""
    name, value = _found(row, columns.prompt, columns)
    if isinstance(value, list):
        value = _user_message(value, name, row.place)
    return _text(value, name, row.place)


def answer_of(row: Row, columns: Columns, answer_format: AnswerFormat) -> str:
    """The answer: "text" as it is, a number as its digits.

    "integer" is a whole number in any spelling ("1,024", "027", "27.0", 27) as its digits; "hashes"
    is what stands after the last "####", without commas.
    """
    name, value = _found(row, columns.answer, columns)
    text = _text(_number_text(value), name, row.place)
    if answer_format == "hashes":
        return _after_hashes(text, name, row.place)
    return _whole_number(text, name, row.place) if answer_format == "integer" else text


def lacks_answer(row: Row, columns: Columns) -> bool:
    """Whether the column of the answer is there and says nothing, as in some published sets."""
    value = next((v for n in columns.answer if (v := _lookup(row.values, n)) is not _MISSING), 0)
    return value is None or (isinstance(value, str) and not value.strip())


def id_of(row: Row, columns: Columns) -> str:
    """The row's id; a DataError if it is neither text nor integer, or missing though needed."""
    if columns.requires_id:
        _found(row, columns.id, columns)
    for name in columns.id:
        value = _lookup(row.values, name)
        if value is _MISSING:
            continue
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise DataError(
                f"{row.place}: {name!r} must be a string or an integer, got {_shown(value)}"
            )
        _check_whole_characters(str(value), name, row.place)
        return str(value)
    return str(row.number)


def _found(row: Row, names: tuple[str, ...], columns: Columns) -> tuple[str, Any]:
    for name in names:
        value = _lookup(row.values, name)
        if value is not _MISSING:
            return name, value
    wanted = " or ".join(repr(name) for name in names)
    present = ", ".join(repr(name)[:40] for name in list(row.values)[:8]) or "none"
    raise DataError(
        f"{row.place}: key {wanted} is missing; add it or name another in {columns.setting} "
        f"(keys found: {present})"
    )


def _lookup(row: dict[str, Any], name: str) -> Any:
    if name in row:
        return row[name]
    head, dot, tail = name.partition(".")
    inner = row.get(head)
    return _lookup(inner, tail) if dot and isinstance(inner, dict) else _MISSING


def _user_message(messages: list[Any], name: str, place: str) -> Any:
    first = messages[0] if len(messages) == 1 else None
    if not isinstance(first, dict) or first.get("role") != "user":
        raise DataError(
            f"{place}: {name!r} must be a text or a conversation of one user message, got a list "
            f"of {len(messages)}; a system message goes into data.system_prompt"
        )
    return first.get("content")


def _number_text(value: object) -> object:
    """A finite number as its digits, 27.0 as "27"; everything else unchanged."""
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value == int(value) else repr(value)
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _text(value: object, name: str, place: str) -> str:
    if not isinstance(value, str):
        cure = "fill it in" if value is None else "write it in quotes"
        raise DataError(
            f"{place}: {name!r} must be a string, got {_shown(value)}; {cure} or drop the line"
        )
    if not value or value.isspace():
        raise DataError(f"{place}: {name!r} is empty; fill it in or drop the line")
    _check_whole_characters(value, name, place)
    return value


def _check_whole_characters(text: str, name: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place}: {name!r} holds half of a character (a lone surrogate, at {error.start}), "
            "which cannot be written or tokenised; correct it or drop the line"
        ) from error


def _after_hashes(text: str, name: str, place: str) -> str:
    _, hashes, answer = text.rpartition("####")
    answer = answer.replace(",", "").strip()
    if not hashes or not answer:
        raise DataError(
            f"{place}: {name!r} has nothing after '####', got {_shown(text[-40:])}; end it with "
            "'#### ANSWER' or set data.answer_format"
        )
    return answer


def _whole_number(text: str, name: str, place: str) -> str:
    match = re.fullmatch(r"([+-]?)([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.0*)?", text.strip())
    if match is None:
        raise DataError(
            f"{place}: {name!r} must be a whole number, got {_shown(text)}; correct it or set "
            "data.answer_format = 'text'"
        )
    digits = match[2].replace(",", "").lstrip("0") or "0"
    return f"-{digits}" if match[1] == "-" and digits != "0" else digits


def _shown(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:40]}".replace("\n", " ")
