"""The resolved config: defaults < TOML files left to right < command line flags.

`python -m rollverify.config.load --config FILE ...` prints it as TOML, with --json as JSON.
"""

import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_origin

import tomli
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rollverify.config.base import Table
from rollverify.config.dump import to_json, to_toml
from rollverify.config.losses import UNIONS, class_of, name_in
from rollverify.config.tables import SETTINGS, Config
from rollverify.errors import ConfigError, exit_code

Document = dict[str, Any]
"""Tables by name, as a TOML file holds them."""

DEFAULT_CONFIG = Path("train_configs") / "default.toml"
"""The file used when no --config is given."""

LATEST = "latest"
"""Value of --resume when no path follows it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LoadedConfig:
    """A config and where it came from."""

    config: Config
    config_files: tuple[str, ...]
    """Files read, left to right."""
    resume: str | None
    """Checkpoint folder to continue from, "latest" for the newest one, None for a new run."""
    sources: Mapping[str, str]
    """File or flag that set a dotted key; keys left at their default are absent."""


def load_config(argv: Sequence[str], *, prog: str = "./run_train.sh") -> LoadedConfig:
    """Resolve the config of a command line without the program's name; --help exits with code 0."""
    if "-h" in argv or "--help" in argv:
        from rollverify.config.help import print_help  # tyro is needed for nothing else

        print_help(prog)
    files, resume, flags = _read_flags(argv)
    files = files or (default_config_file(),)
    layers = [*((file, read_file(file)) for file in files), ("", flags)]
    config, sources = _resolve(layers)
    return LoadedConfig(config=config, config_files=files, resume=resume, sources=sources)


def read_config(files: Sequence[str] = (), settings: Document | None = None) -> Config:
    """The config of some files and settings, as in {"training": {"steps": 3}}, which come last."""
    layers = [*((file, read_file(file)) for file in files), ("settings", settings or {})]
    return _resolve(layers)[0]


def default_config_file() -> str:
    """Path of the default config file, looked for here and then beside the package."""
    repository_root = Path(__file__).resolve().parents[2]
    for path in (DEFAULT_CONFIG, repository_root / DEFAULT_CONFIG):
        if path.is_file():
            return str(path)
    raise ConfigError(
        f"{DEFAULT_CONFIG}: no such file here or in {repository_root}; "
        "start from the repository root or give --config FILE"
    )


def read_file(file: str) -> Document:
    """The tables of a TOML file, not yet checked."""
    path = Path(file)
    try:
        if path.is_file():
            return tomli.loads(path.read_bytes().decode("utf-8-sig"))
        if path.is_dir():
            problem = f"is a folder, not a config file; {_similar_files(path)}"
        elif path.exists():
            problem = "is a pipe or device; give a file"
        else:
            problem = f"no such config file; {_similar_files(path)}"
    except OSError as error:
        problem = f"cannot be read ({error.strerror}); check the path"
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 text (byte {error.start}); save it as UTF-8"
    except tomli.TOMLDecodeError as error:
        problem = f"not valid TOML at line {error.lineno}, column {error.colno}: {error.msg}"
    except (ValueError, RecursionError) as error:  # Python's own limits of digits and of nesting
        problem = f"not valid TOML: {error}"
    raise ConfigError(f"{file}: {problem}")


def _similar_files(path: Path) -> str:
    """Cure for a path that is no file: similar TOML files, beside it or in the usual folder."""
    beside = {path.parent: "*.toml", DEFAULT_CONFIG.parent: "**/*.toml"}
    places = {path: "*.toml"} if path.is_dir() else beside
    found = [file for folder, names in places.items() for file in sorted(folder.glob(names))]
    files = {file.resolve(): file for file in found}
    stems = difflib.get_close_matches(path.stem, [file.stem for file in files], n=3)
    near = [str(file) for file in files.values() if file.stem in stems]
    if near:
        return f"did you mean {' or '.join(near)}?"
    known = [str(file) for file in files.values()]
    return f"there is {', '.join(known[:5])}" if known else "there is no TOML file near it"


def _read_flags(argv: Sequence[str]) -> tuple[tuple[str, ...], str | None, Document]:
    groups: list[tuple[str, list[str]]] = []  # flags with their values; "--a=b" is "--a b"
    for word in argv:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            groups.append((flag, [value] if equals else []))
        elif groups:
            groups[-1][1].append(word)
        else:
            raise ConfigError(
                f"unexpected argument {word!r}; config files are given as --config FILE"
            )
    files: list[str] = []
    resume: str | None = None
    document: Document = {}
    for flag, values in groups:
        if flag == "--config":
            files.append(_only(flag, values, "a TOML file; repeat --config for another file"))
        elif flag == "--resume":
            resume = _only(flag, values or [LATEST], "at most one path")
        else:
            table, name, value = _read_flag(flag, values)
            document.setdefault(table, {})[name] = value
    return tuple(files), resume, document


def _only(flag: str, values: list[str], wanted: str) -> str:
    if len(values) != 1 or not values[0]:
        got = " ".join(map(repr, values)) or "nothing"
        raise ConfigError(f"{flag}: takes {wanted}, got {got}")
    return values[0]


def _read_flag(flag: str, values: list[str]) -> tuple[str, str, object]:
    """Table, name and value of a setting; text that is no value of its type stays text."""
    key = flag.removeprefix("--").replace("-", "_")
    table, _, name = key.rpartition(".")
    turns_off = key not in SETTINGS and name.startswith("no_")
    setting = SETTINGS.get(f"{table}.{name.removeprefix('no_')}" if turns_off else key)
    if setting is None or (turns_off and setting.annotation is not bool):
        raise ConfigError(f"{flag}: {_unknown(key, 'flag')}")
    if setting.annotation is bool and not values:
        return table, name.removeprefix("no_") if turns_off else name, not turns_off
    if len(values) != 1 or turns_off:
        got = " ".join(map(repr, values)) or "nothing"
        raise ConfigError(f"{flag}: takes {'no' if turns_off else 'one'} value, got {got}")
    return table, name, _parse(values[0], setting.annotation)


def _parse(text: str, kind: object) -> object:
    """The value that a text stands for; the text itself where it is none of that kind."""
    try:
        if kind is int or kind is float:
            return int(text) if kind is int else float(text)
        if kind is bool:
            return {"true": True, "false": False}.get(text.lower(), text)
        if get_origin(kind) in (dict, list):
            document = tomli.loads(f"value = {text}")
            return document["value"] if list(document) == ["value"] else text
    except (ValueError, RecursionError):
        pass
    return text


def _resolve(layers: Sequence[tuple[str, Document]]) -> tuple[Config, dict[str, str]]:
    """The config of layers, each a file's name ("" for the flags) and what it says.

    Values are checked layer by layer, so that a mistake is reported even where a later layer
    replaces it; rules across settings hold for the end result only.
    """
    values: Document = {}
    sources: dict[str, str] = {}
    config = Config()
    for number, (file, layer) in enumerate(layers, 1):
        _overlay(values, sources, file, layer)
        try:
            config = Config.model_validate(values)
        except ValidationError as error:
            mistake = error.errors()[0]
            if mistake["loc"]:
                key = ".".join(map(str, mistake["loc"][:2]))
                place = file or _flag(key)
                raise ConfigError(f"{place}: {_describe(mistake, values)}") from None
            if number == len(layers):
                broken = mistake["msg"].removeprefix("Value error, ")
                keys = re.findall(r"[a-z_]+\.[a-z_0-9]+", broken)
                places = dict.fromkeys(sources[key] for key in keys if key in sources)
                raise ConfigError(f"{', '.join(places) or 'defaults'}: {broken}") from None
    return config, sources


def _overlay(values: Document, sources: dict[str, str], file: str, layer: Document) -> None:
    """Put a layer on top: tables merge; another loss drops the settings of the one below."""
    for table, entries in layer.items():
        if not isinstance(entries, dict):
            values[table] = entries
            continue
        new = cast(Document, entries)
        below: Document = values.setdefault(table, {})
        if table in UNIONS:
            for key in _settings_of_another(table, below, below | new):
                del below[key]
                sources.pop(f"{table}.{key}", None)
        for name, value in new.items():
            key = f"{table}.{name}"
            place = file or _flag(key)
            is_merged = isinstance(value, dict) and bool(below.get(name))
            below[name] = _merge(below.get(name), value)
            sources[key] = f"{sources[key]}, {place}" if is_merged else place


def _settings_of_another(table: str, old: Document, new: Document) -> list[str]:
    """Keys that only the loss or correction of old has, where new names another one."""
    if name_in(table, old) == name_in(table, new):
        return []
    ours, theirs = class_of(table, old).__mro__[1:], class_of(table, new).__mro__[1:]
    common = [kind for kind in ours if kind in theirs and issubclass(kind, Table)]
    shared = {name for kind in common for name in kind.model_fields}
    return [key for key in old if key not in shared]


def _merge(below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        old, new = cast(Document, below), cast(Document, above)
        return old | {key: _merge(old.get(key), value) for key, value in new.items()}
    return above


def _flag(key: str) -> str:
    """The flag of a dotted key, such as "--rollout.group-size"."""
    return "--" + key.replace("_", "-")


def _describe(mistake: ErrorDetails, values: Document) -> str:
    """One line of a mistake that pydantic found: the key, what it must be, and what it is."""
    location = [str(part) for part in mistake["loc"] if part != "[key]"]
    key = ".".join(part if part.isidentifier() else repr(part) for part in location)
    got = f"got {_shorten(mistake['input'])}"
    if mistake["type"] == "extra_forbidden":
        if key in SETTINGS:
            table, name = location
            return _unread(table, name, values[table])
        return _unknown(key, "key" if "." in key else "table")
    if mistake["type"] == "model_type":
        return f"{key!r} must be a table, {got}; write it as [{key}]"
    text = mistake["msg"].removeprefix("Value error, ").replace("dictionary", "table")
    return f"{key} {re.sub('^(Input|String) should', 'must', text)}, {got}"


def _unread(table: str, name: str, entries: Document) -> str:
    readers = [own for own, kind in UNIONS[table][1].items() if name in kind.model_fields]
    owners = " or ".join(map(repr, readers)) or "one of your own"
    return (
        f"{table}.{name} has no effect with {table}.name = {name_in(table, entries)!r}: only "
        f"{owners} reads it; remove it or change {table}.name"
    )


def _unknown(key: str, what: str) -> str:
    """A key, table or flag that does not exist, and which may have been meant."""
    table, _, name = key.rpartition(".")
    tables = {known: f"[{known}]" for known in Config.model_fields}
    names = [known.rpartition(".")[2] for known in SETTINGS if known.startswith(f"{table}.")]
    if key in tables:
        return f"{key!r} is a table; give one of its keys as --{key}.KEY"
    near = difflib.get_close_matches(name, names, n=1) or [
        known for known in names if len(name) > 2 and (name in known or known in name)
    ]
    keys = [f"{table}.{known}" for known in near[:1]]
    elsewhere = [known for known in SETTINGS if known.endswith(f".{name}")]
    if table and not keys:
        keys = elsewhere or difflib.get_close_matches(key, SETTINGS, n=1, cutoff=0.75)
    elif not table:
        keys = [tables[known] for known in difflib.get_close_matches(name, tables, n=1)]
        keys = keys or [tables[known] for known in tables if known.startswith(name[:4])]
    keys = keys or elsewhere
    if keys:
        cure = f"did you mean {' or '.join(keys)}?"
    elif table in tables:
        cure = f"the keys of [{table}] are {', '.join(names)}"
    else:
        cure = f"the tables are {', '.join(tables)}"
    return f"unknown {what} {key!r}; {cure}"


def _shorten(value: object) -> str:
    """`repr` of a value on one line, cut after 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def main(argv: Sequence[str]) -> int:
    """Print the resolved config of a command line; return the exit code."""
    as_json = "--json" in argv
    rest = [word for word in argv if word != "--json"]
    try:
        loaded = load_config(rest, prog="python -m rollverify.config.load [--json]")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)
    config = loaded.config
    sys.stdout.write(to_json(config) if as_json else to_toml(config, loaded.sources))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
