"""The "did you mean" part of error messages about unknown keys, tables and flags.

It knows the schema's names only; it does not decide what is an error.
"""

import difflib

from rollverify.config.schema import SETTINGS, TABLES
from rollverify.config.setting import settings_of


def suggest_table(name: str) -> str:
    """Cure for an unknown table: the nearest table, or the tables that own a key of that name."""
    near = difflib.get_close_matches(name, TABLES, n=1) or [
        known for known in TABLES if len(name) > 3 and known.startswith(name[:4])
    ]
    if near:
        return f"did you mean [{near[0]}]?"
    return _owners(name) or f"the tables are {', '.join(TABLES)}"


def suggest_key(table: str, name: str) -> str:
    """Cure for an unknown key of a known table: nearest key, else owner tables, else all keys."""
    names = settings_of(TABLES[table])
    near = difflib.get_close_matches(name.replace("-", "_"), names, n=1) or [
        known for known in names if len(name) > 2 and (name in known or known in name)
    ]
    if near:
        return f"did you mean {near[0]!r}?"
    return _owners(name) or f"the keys of [{table}] are {', '.join(names)}"


def suggest_flag(key: str) -> str:
    """Cure for an unknown flag, given its dotted key with underscores."""
    table, _, name = key.rpartition(".")
    if key in TABLES:
        flags = [setting.flag for setting in settings_of(TABLES[key]).values()]
        return f"{key!r} is a table; give one of its keys, such as {flags[0]}"
    owners = [setting.flag for setting in SETTINGS.values() if setting.name == name]
    near = difflib.get_close_matches(key, SETTINGS, n=1, cutoff=0.75)
    if not near and table in TABLES:
        near = [
            f"{table}.{one}"
            for one in difflib.get_close_matches(name, settings_of(TABLES[table]), n=1)
        ]
    flags = [SETTINGS[one].flag for one in near] or owners
    if flags:
        return f"did you mean {' or '.join(flags)}?"
    return "see --help for the list of flags"


def _owners(name: str) -> str:
    """The tables that own a key of this name, in words; empty when none does."""
    tables = [f"[{setting.table}]" for setting in SETTINGS.values() if setting.name == name]
    return f"{name!r} belongs to {' or '.join(tables)}" if tables else ""
