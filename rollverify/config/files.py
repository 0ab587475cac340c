"""Config files: finding the default one, and reading one into checked values.

Merging several files is in `load`.
"""

import difflib
from pathlib import Path
from typing import cast

import tomli

from rollverify.config.schema import SETTINGS, TABLES
from rollverify.config.setting import check_value, shorten
from rollverify.config.suggest import suggest_key, suggest_table
from rollverify.errors import ConfigError

DEFAULT_CONFIG = Path("train_configs") / "default.toml"
"""The file used when no --config is given."""


def default_config_file() -> str:
    """Path of the default config file, looked for here and then beside the package.

    Raises:
        ConfigError: neither place has it.
    """
    repository_root = Path(__file__).resolve().parents[2]
    for path in (DEFAULT_CONFIG, repository_root / DEFAULT_CONFIG):
        if path.is_file():
            return str(path)
    raise ConfigError(
        f"{DEFAULT_CONFIG}: no such file here or in {repository_root}; "
        "start from the repository root or give --config FILE"
    )


def read_values(file: str) -> dict[str, object]:
    """Read one config file.

    Returns:
        Checked values by dotted key, such as {"training.lr": 1e-3}, in the order of the file.

    Raises:
        ConfigError: the file cannot be read or parsed, or holds a table, key or value that the
            schema does not have.
    """
    try:
        return _check_document(_parse(file))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def parse_table(key: str, text: str) -> dict[str, object]:
    """Parse a TOML inline table, such as "{ block_size = 16 }", given as a flag for `key`.

    Raises:
        ConfigError: it is not one.
    """
    try:
        value = tomli.loads(f"value = {text}")
    except tomli.TOMLDecodeError:
        value = {}
    if list(value) != ["value"] or not isinstance(value["value"], dict):
        raise ConfigError(f"{key!r} must be a table such as '{{ a = 1 }}', got {shorten(text)}")
    return cast(dict[str, object], value["value"])


def _parse(file: str) -> dict[str, object]:
    """The file's TOML document."""
    path = Path(file)
    try:
        return tomli.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"no such config file; {_similar_files(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"is a folder, not a config file; {_similar_files(path)}") from None
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror}); check the path") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except tomli.TOMLDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"not valid TOML at {where}: {error.msg}") from None


def _similar_files(path: Path) -> str:
    """Cure for a path that is no file: similar TOML files, beside it or in the usual folder."""
    beside = {path.parent: "*.toml", DEFAULT_CONFIG.parent: "**/*.toml"}
    places = {path: "*.toml"} if path.is_dir() else beside
    found = [one for folder, names in places.items() for one in sorted(folder.glob(names))]
    files = {one.resolve(): one for one in found}
    stems = difflib.get_close_matches(path.stem, [one.stem for one in files], n=3)
    near = [str(one) for one in files.values() if one.stem in stems]
    if near:
        return f"did you mean {' or '.join(near)}?"
    known = [str(one) for one in files.values()]
    return f"there is {', '.join(known[:5])}" if known else "there is no TOML file near it"


def _check_document(document: dict[str, object]) -> dict[str, object]:
    """Flatten a document to dotted keys, checking tables, keys and values."""
    values: dict[str, object] = {}
    for table, entries in document.items():
        if table not in TABLES:
            raise ConfigError(f"unknown table {table!r}; {suggest_table(table)}")
        if not isinstance(entries, dict):
            got = f"{type(entries).__name__} {shorten(entries)}"
            raise ConfigError(f"{table!r} must be a table, got {got}; write it as [{table}]")
        for name, value in cast(dict[str, object], entries).items():
            key = f"{table}.{name}"
            if key not in SETTINGS:
                raise ConfigError(f"unknown key {key!r}; {suggest_key(table, name)}")
            values[key] = check_value(SETTINGS[key], value)
    return values
