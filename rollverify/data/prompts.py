"""The prompt record, a whole set of them read from a source, and the project's own file format."""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollverify.data.columns import answer_of, id_of, lacks_answer, prompt_of
from rollverify.data.rows import EXAMPLE, Row, read_hub_rows, read_rows
from rollverify.data.sources import PromptSource
from rollverify.data.templates import fill, unfill
from rollverify.errors import DataError
from rollverify.files import write_atomic

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, frozen=True)
class Prompt:
    """One problem as the loop sees it."""

    prompt_id: str
    """Unique within a set."""
    text: str
    """Exactly what is tokenised: the problem with every template around it."""
    answer: str
    """The reward function decides what it means."""
    problem: str = ""
    """The problem without any template; "" if it is `text` itself."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False, repr=False)
    """The whole row as it was read, for rewards; neither part of what a prompt is nor saved."""

    @property
    def bare_text(self) -> str:
        """The problem alone, to be compared with other problems."""
        return self.problem or self.text


@dataclass(kw_only=True, slots=True)
class PromptSet:
    """The prompts of a source, in its order."""

    prompts: list[Prompt] = field(default_factory=list[Prompt])
    """At least one; ids are unique."""
    places: list[str] = field(default_factory=list[str])
    """Where each stands, for messages: "file:LINE" or "dataset, row ROW"."""
    unanswered: list[str] = field(default_factory=list[str])
    """Places of rows that were left out because they have no answer."""
    num_rows: int = 0
    """Rows read, duplicates included."""
    num_duplicates: int = 0
    """Rows whose problem had occurred before, but for white space."""
    num_contradictions: int = 0
    """Of these, rows with another answer than the first."""


def write_jsonl(path: str | os.PathLike[str], prompts: Iterable[Prompt]) -> None:
    """Write ids, texts and answers as JSON lines that `load_prompts` reads, in one move."""
    rows = ({"id": p.prompt_id, "prompt": p.text, "answer": p.answer} for p in prompts)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    try:
        write_atomic(path, lines)
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror}; choose a folder that can be written"
        ) from error


def load_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """Read a prompt file of one's own, see `read_prompt_set`."""
    return read_prompt_set(PromptSource(location=Path(path))).prompts


def read_prompt_set(source: PromptSource, wrap: Callable[[str], str] | None = None) -> PromptSet:
    """Read all prompts of a source; `wrap` puts the model's chat template around a worded problem.

    What cannot be used is a DataError: one line naming the file, the line, the key and the cure.
    """
    found = PromptSet()
    first_of: dict[bytes, tuple[str, str]] = {}
    place_of_id: dict[str, str] = {}
    for row in _rows_of(source):
        found.num_rows += 1
        if lacks_answer(row, source.columns):
            found.unanswered.append(row.place)
            continue
        problem = _problem_of(row, source)
        answer = answer_of(row, source.columns, source.answer_format)
        key = hashlib.blake2b(" ".join(problem.split()).encode(), digest_size=16).digest()
        first_answer, first_place = first_of.setdefault(key, (answer, row.place))
        if first_place != row.place:
            _count_duplicate(found, row.place, first_place, is_same=first_answer == answer)
            if source.drop_duplicates:
                continue
        prompt = _worded(row, problem, answer, source, wrap)
        used = place_of_id.setdefault(prompt.prompt_id, row.place)
        if used != row.place:
            raise DataError(
                f"{row.place}: id {prompt.prompt_id!r} is already used by {used}; make ids unique "
                "(a line without an id uses its line number), or set data.duplicates = 'drop' if "
                "whole prompts repeat"
            )
        found.prompts.append(prompt)
        found.places.append(row.place)
    if not found.prompts and found.unanswered:
        raise DataError(
            f"{found.unanswered[0]}: the answer is empty, as in every row; fill it in or name "
            f"another column in {source.columns.setting}"
        )
    if not found.prompts:
        raise DataError(f"{source.location} is empty; give it lines like {EXAMPLE}")
    if found.unanswered:
        logger.warning(
            "%s: %d of %d rows of %s have no answer and are left out, the first is %s",
            source.setting,
            len(found.unanswered),
            found.num_rows,
            source.location,
            found.unanswered[0],
        )
    if found.num_duplicates:
        logger.info(
            "%s: %d of %d rows of %s repeat an earlier prompt (%d with another answer) and are %s",
            source.setting,
            found.num_duplicates,
            found.num_rows,
            source.location,
            found.num_contradictions,
            "dropped" if source.drop_duplicates else "kept (data.duplicates)",
        )
    return found


def _rows_of(source: PromptSource) -> Iterator[Row]:
    names = source.columns.names()
    if isinstance(source.location, Path):
        return read_rows(source.location, names)
    return read_hub_rows(source.location, names, local_form=source.local_form)


def _problem_of(row: Row, source: PromptSource) -> str:
    problem = unfill(source.taken_off, prompt_of(row, source.columns))
    if not problem or problem.isspace():
        raise DataError(
            f"{row.place}: the prompt is empty without the template around it; fill it in or drop "
            "the line"
        )
    return problem


def _worded(
    row: Row,
    problem: str,
    answer: str,
    source: PromptSource,
    wrap: Callable[[str], str] | None,
) -> Prompt:
    text = fill(source.template, problem)
    if wrap is not None:
        try:
            text = wrap(text)
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from error
    return Prompt(
        prompt_id=id_of(row, source.columns),
        text=text,
        answer=answer,
        problem="" if text == problem else problem,
        columns=row.values,
    )


def _count_duplicate(found: PromptSet, place: str, first_place: str, *, is_same: bool) -> None:
    found.num_duplicates += 1
    if is_same:
        return
    found.num_contradictions += 1
    if found.num_contradictions <= 3:
        logger.warning("%s: the same prompt as %s with another answer", place, first_place)
