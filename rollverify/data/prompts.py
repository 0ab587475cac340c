"""The prompt record, its JSON-lines file format, and its encoding to token ids.

One JSON object per line: "prompt" (text given to the model), "answer" (what the reward compares
with) and optionally "id" (text or integer, default the line number). Other keys are ignored.
This module does not choose the order of prompts (see `loader.py`) and imports no torch.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rollverify.errors import DataError


@dataclass(kw_only=True, slots=True, frozen=True)
class Prompt:
    """One problem as the loop sees it."""

    prompt_id: str
    """Unique within a file."""
    text: str
    """Exactly what is tokenised; no template is added."""
    answer: str
    """The reward function decides what it means."""


def write_jsonl(path: str | os.PathLike[str], prompts: Iterable[Prompt]) -> None:
    """Write prompts as JSON lines; the file appears complete or not at all.

    Args:
        path: file to write; its folder is made if missing, an existing file is replaced.
        prompts: written in order; `load_prompts` reads the same ids, texts and answers.

    Raises:
        DataError: if the folder cannot be made or written.
    """
    rows = [{"id": p.prompt_id, "prompt": p.text, "answer": p.answer} for p in prompts]
    target = Path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("w", encoding="utf-8", newline="\n") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot write {target}: {error.strerror}; choose a folder that can be written"
        ) from error


def load_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """Read a prompt file, in the order of its lines.

    Prompt i comes from line i + 1: blank lines are refused except at the end of the file.

    Args:
        path: JSON-lines file, UTF-8.

    Returns:
        At least one prompt; ids are unique.

    Raises:
        DataError: one line naming the file, the line, the key and the cure, if the file is missing,
            unreadable or empty, a line is not a JSON object, a key is missing, empty or of the
            wrong type, or an id occurs twice.
    """
    lines = _read_text(path).split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise DataError(f'{path} is empty; give it lines like {{"prompt": "...", "answer": "..."}}')
    prompts: list[Prompt] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        prompt = _parse_line(line, number, f"{path}:{number}")
        first = line_of.setdefault(prompt.prompt_id, number)
        if first != number:
            raise DataError(
                f"{path}:{number}: id {prompt.prompt_id!r} is already used on line {first}; "
                "make ids unique (a line without an id uses its line number)"
            )
        prompts.append(prompt)
    return prompts


def encode_prompts(
    prompts: Sequence[Prompt],
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    path: str | os.PathLike[str],
) -> list[list[int]]:
    """Token ids of every prompt, without any special token added (no BOS).

    Args:
        prompts: as `load_prompts` returned them, so that prompt i is line i + 1 of `path`.
        tokenizer: tokenizer of the model that gets the ids.
        max_prompt_tokens: longest prompt allowed, in tokens.
        path: file the prompts came from, for messages only.

    Returns:
        One list of 1..max_prompt_tokens ids per prompt.

    Raises:
        DataError: naming file and line, if a prompt is too long, gives no token, or holds a
            character the tokenizer does not know.
    """
    encoded: list[list[int]] = []
    for number, prompt in enumerate(prompts, start=1):
        where = f"{path}:{number}"
        try:
            ids = tokenizer.encode(prompt.text, add_special_tokens=False).ids
        except (
            Exception
        ) as error:  # `tokenizers` raises the bare class, e.g. for unknown characters
            raise DataError(
                f"{where}: the tokenizer cannot encode the prompt ({error}); "
                "use only characters of the model's vocabulary"
            ) from error
        if not ids:
            raise DataError(f"{where}: the prompt gives no token; write a prompt or drop the line")
        if len(ids) > max_prompt_tokens:
            raise DataError(
                f"{where}: the prompt has {len(ids)} tokens, more than "
                f"rollout.max_prompt_tokens = {max_prompt_tokens}; raise that or drop the line"
            )
        encoded.append(ids)
    return encoded


def _read_text(path: str | os.PathLike[str]) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise DataError(
            f"prompt file {path} does not exist; check data.train_file and data.test_file"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from error
    except OSError as error:
        raise DataError(
            f"cannot read prompt file {path}: {error.strerror}; give a readable JSON-lines file"
        ) from error


def _parse_line(line: str, number: int, where: str) -> Prompt:
    if not line.strip():
        raise DataError(f"{where}: blank line; remove it")
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not valid JSON ({error.msg}, column {error.colno}); "
            "write one JSON object per line"
        ) from error
    except (ValueError, RecursionError) as error:  # numbers of > 4,300 digits, nesting too deep
        raise DataError(
            f"{where}: JSON too large to read; write one flat object per line"
        ) from error
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: expected a JSON object, got {type(row).__name__}; "
            'write {"prompt": "...", "answer": "..."}'
        )
    prompt_id = row.get("id", number)
    if isinstance(prompt_id, bool) or not isinstance(prompt_id, str | int):
        raise DataError(f"{where}: 'id' must be a string or an integer, got {_shown(prompt_id)}")
    return Prompt(
        prompt_id=str(prompt_id),
        text=_text_value(row, "prompt", where),
        answer=_text_value(row, "answer", where),
    )


def _text_value(row: dict[str, Any], key: str, where: str) -> str:
    if key not in row:
        found = ", ".join(repr(name)[:40] for name in list(row)[:8]) or "none"
        raise DataError(f"{where}: key {key!r} is missing; add it (keys found: {found})")
    value = row[key]
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} must be a string, got {_shown(value)}; put it in quotes")
    if not value.strip():
        raise DataError(f"{where}: {key!r} is empty; fill it in or drop the line")
    return value


def _shown(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:40]}"
