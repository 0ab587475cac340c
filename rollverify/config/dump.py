"""A config as dict, JSON or TOML text, and the difference of two configs."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, cast

from rollverify.config.tables import Config


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Plain values by table and key, in the order of the tables."""
    return {name: dict(table) for name, table in config}


def to_json(config: Config) -> str:
    """Indented JSON with a final newline; infinity, which JSON lacks, is the string "inf"."""
    values = {
        table: {key: "inf" if value == math.inf else value for key, value in entries.items()}
        for table, entries in to_dict(config).items()
    }
    return json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def to_toml(config: Config, sources: Mapping[str, str] | None = None) -> str:
    """TOML text that loads to an equal config; each line ends with where its value was set."""
    notes = sources or {}
    blocks: list[str] = []
    for table, values in to_dict(config).items():
        lines = [f"[{table}]"]
        for name, value in values.items():
            note = notes.get(f"{table}.{name}")
            comment = f"  # {note}" if note is not None else ""
            lines.append(f"{name} = {toml_value(value)}{comment}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def toml_value(value: object) -> str:
    """One value in TOML syntax; tables are written inline."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(item) for item in cast(list[object], value)) + "]"
    if isinstance(value, dict):
        pairs = cast(dict[str, object], value).items()
        inner = ", ".join(f"{_toml_key(key)} = {toml_value(item)}" for key, item in pairs)
        return f"{{ {inner} }}" if inner else "{}"
    raise TypeError(f"no TOML form for {value!r}")


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def diff(config_a: Config, config_b: Config) -> list[str]:
    """The settings that differ, as lines "table.key: old -> new"; "unset" where a loss has none."""
    old, new = to_dict(config_a), to_dict(config_b)
    return [
        f"{table}.{key}: {_shown(before, key)} -> {_shown(after, key)}"
        for table in old
        for before, after in [(old[table], new[table])]
        for key in before | after
        if before.get(key) != after.get(key)
    ]


def _shown(entries: Mapping[str, object], key: str) -> str:
    return toml_value(entries[key]) if key in entries else "unset"
