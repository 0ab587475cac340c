"""What a text such as "gsm8k", "gsm8k:FILE", "my.parquet" or "owner/name" stands for."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from rollverify.data.columns import AnswerFormat, Columns
from rollverify.data.presets import OWN, PRESETS
from rollverify.data.rows import FILE_SUFFIXES, HubDataset
from rollverify.data.templates import TEMPLATES
from rollverify.errors import ConfigError

Use = Literal["train", "test"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSource:
    """Where prompts are, and how they are read; the defaults are those of a file of one's own."""

    location: Path | HubDataset
    columns: Columns = OWN.columns
    answer_format: AnswerFormat = "text"
    drop_duplicates: bool = False
    taken_off: str = TEMPLATES["none"]
    """Template that the data have put around the problem; taken off where it is there."""
    template: str = TEMPLATES["none"]
    setting: str = "data.train"
    local_form: str = "data.train = 'FILE'"
    """How the same is read from a file, for messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOptions:
    """Settings beside the text; "auto" leaves the choice to the preset."""

    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    """Column for "prompt", "answer" and "id"."""
    hub: Mapping[str, str] = field(default_factory=dict[str, str])
    """"subset", "split" and "revision" on the hub."""
    answer_format: Literal["auto"] | AnswerFormat = "auto"
    template: str = "auto"
    """A name in `TEMPLATES` or a text that holds {prompt}."""
    duplicates: Literal["auto", "keep", "drop"] = "auto"


def resolve_source(
    text: str, *, use: Use, setting: str, options: SourceOptions | None = None
) -> PromptSource:
    """The source that a text stands for; nothing of it is opened.

    A preset's name alone is its dataset on the hub; "PRESET:PLACE" reads another place by the same
    columns. A place is a file if it exists, ends in .jsonl, .json or .parquet, or begins with
    ".", "/" or "~"; else "owner/name" is a dataset on the hub.
    `use` chooses the split of a dataset; `setting` is where the text was written, for messages.
    """
    options = options or SourceOptions()
    name, colon, place = text.partition(":")
    if name not in PRESETS:
        name, place = "", text
    preset = PRESETS.get(name, OWN)
    if name and not colon:
        given = {"subset": preset.subset, "split": preset.splits[use], **options.hub}
        location = HubDataset(name=preset.hub, **given)
    else:
        location = _location(place, text, use, setting, options.hub)
    template = preset.template if options.template == "auto" else options.template
    drop = {"auto": preset.drop_duplicates, "drop": True, "keep": False}[options.duplicates]
    form = preset.answer_format if options.answer_format == "auto" else options.answer_format
    named = {key: (column,) for key, column in options.columns.items()}
    where = {"setting": f"{setting}_columns", "requires_id": "id" in named}
    return PromptSource(
        location=location,
        columns=replace(preset.columns, **where, **named),
        answer_format=form,
        drop_duplicates=drop,
        taken_off=TEMPLATES[preset.taken_off],
        template=TEMPLATES.get(template, template),
        setting=setting,
        local_form=f"{setting} = '{name}{':' * bool(name)}FILE'",
    )


def _location(
    place: str, text: str, use: Use, setting: str, hub: Mapping[str, str]
) -> Path | HubDataset:
    """What a place stands for; `text` is all that was written, with the preset before it."""
    if _is_file(place):
        if hub:
            raise ConfigError(
                f"{setting}_hub is set but {setting} = '{place}' is a file; remove {setting}_hub"
            )
        try:
            return Path(place).expanduser()
        except RuntimeError as error:
            raise ConfigError(
                f"{setting} = {_shown(text)}: the user after '~' has no home folder; write the "
                "path from '/'"
            ) from error
    if re.fullmatch(r"[\w.-]+/[\w.-]+", place):
        return HubDataset(name=place, **{"split": use, **hub})
    raise ConfigError(f"{setting} = {_shown(text)}{_why_unknown(place, text)}")


def _is_file(place: str) -> bool:
    """Whether a place is meant as a file: by its name, or because there is one."""
    if not place or "\0" in place:
        return False
    try:
        is_there = Path(place).exists()
    except OSError:  # a name that is too long for any file
        is_there = False
    if is_there or place.startswith((".", "/", "~")):
        return True
    has_scheme = re.match(r"\w+:", place) is not None  # a misspelt preset, or an address
    return place.lower().endswith(FILE_SUFFIXES) and not has_scheme


def _why_unknown(place: str, text: str) -> str:
    if place in PRESETS:
        return (
            f": '{place}' is a preset, but a file or 'owner/name' must follow "
            f"'{text.removesuffix(place)}'; name one preset only"
        )
    near = difflib.get_close_matches(place[:40].partition(":")[0].lower(), PRESETS, n=1, cutoff=0.5)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    what = "" if place == text else f": {_shown(place)}"
    return (
        f"{what} is neither a file ({', '.join(FILE_SUFFIXES)}), nor a preset "
        f"({', '.join(PRESETS)}), nor a dataset 'owner/name'{hint}"
    )


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 60 else f"{text[:60]!r}..."
