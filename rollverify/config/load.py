"""The resolved config: defaults < TOML files left to right < command line flags.

`python -m rollverify.config.load --config FILE ...` prints it and exits, as TOML or with --json as
JSON. No model, device or process group is touched here, and torch is not imported.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from rollverify.config.check import RuleError
from rollverify.config.dump import to_json, to_toml
from rollverify.config.files import default_config_file, read_values
from rollverify.config.flags import parse_flags
from rollverify.config.schema import SETTINGS, TABLES, Config
from rollverify.errors import ConfigError, exit_code


@dataclass(kw_only=True, slots=True, frozen=True)
class LoadedConfig:
    """A config and where it came from."""

    config: Config
    """The resolved config."""
    config_files: tuple[str, ...]
    """Files read, left to right."""
    resume: str | None
    """Checkpoint folder to continue from, "latest" for the newest one, None for a new run."""
    overrides: tuple[tuple[str, object], ...]
    """Dotted key and value of each setting given as a flag."""
    sources: Mapping[str, str]
    """File or flag that set a dotted key; keys left at their default are absent."""


def load_config(argv: Sequence[str], *, prog: str = "./run_train.sh") -> LoadedConfig:
    """Resolve the config of a command line.

    Tables are merged key by key; lists, and every other value, are replaced by the later layer.

    Args:
        argv: command line without the program's name.
        prog: program's name in the help text.

    Raises:
        ConfigError: one line that names the file or flag, the key and the cure.
        SystemExit: with code 0, after printing the help.
    """
    flags = parse_flags(argv, prog)
    files = flags.config_files or (default_config_file(),)
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    for file in files:
        _overlay(values, sources, read_values(file), dict.fromkeys(SETTINGS, file))
    flag_names = {key: setting.flag for key, setting in SETTINGS.items()}
    _overlay(values, sources, flags.overrides, flag_names)
    return LoadedConfig(
        config=_build(values, sources),
        config_files=files,
        resume=flags.resume,
        overrides=tuple(flags.overrides.items()),
        sources=sources,
    )


def _overlay(
    values: dict[str, object],
    sources: dict[str, str],
    layer: Mapping[str, object],
    layer_sources: Mapping[str, str],
) -> None:
    """Put one layer over the values so far, in place."""
    for key, value in layer.items():
        below, source = values.get(key), layer_sources[key]
        values[key] = _merge(below, value)
        merged = isinstance(value, dict) and bool(below) and sources[key] != source
        sources[key] = f"{sources[key]}, {source}" if merged else source


def _merge(below: object, above: object) -> object:
    """Tables merge key by key, at every depth; anything else is replaced."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    merged = dict(cast(dict[str, object], below))
    for key, value in cast(dict[str, object], above).items():
        merged[key] = _merge(merged.get(key), value)
    return merged


def _build(values: Mapping[str, object], sources: Mapping[str, str]) -> Config:
    """The config; a broken rule is reported with the files and flags that set its keys."""
    tables: dict[str, dict[str, Any]] = {name: {} for name in TABLES}
    for key, value in values.items():
        setting = SETTINGS[key]
        tables[setting.table][setting.name] = value
    built: dict[str, Any] = {name: TABLES[name](**entries) for name, entries in tables.items()}
    try:
        return Config(**built)
    except RuleError as error:
        places = dict.fromkeys(sources[key] for key in error.keys if key in sources)
        raise ConfigError(f"{', '.join(places) or 'defaults'}: {error}") from None


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
