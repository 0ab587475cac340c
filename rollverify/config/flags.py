"""The command line: --config, --resume and one flag per setting; tyro reads values and prints help.

Files are not touched here, and flags are not merged with them; that is in `load`.
"""

import ast
import contextlib
import dataclasses
import inspect
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

import tyro

from rollverify.config.files import parse_table
from rollverify.config.schema import SETTINGS, TABLES
from rollverify.config.setting import Setting, Table, check_value, settings_of
from rollverify.config.suggest import suggest_flag
from rollverify.errors import ConfigError

LATEST = "latest"
"""Value of --resume when no path follows it."""

DESCRIPTION = (
    "Settings come from the schema's defaults, then the --config files from left to right, then "
    "the flags below; later ones win. Flags may be written with '-' or '_'. The defaults shown are "
    "those of the schema."
)


@dataclass(kw_only=True, slots=True, frozen=True)
class Flags:
    """What the command line says."""

    config_files: tuple[str, ...]
    """Files given with --config, left to right."""
    resume: str | None
    """Path given with --resume, "latest" when it had none, or None without the flag."""
    overrides: dict[str, object]
    """Checked values by dotted key, in order of the command line; the last of a repeated flag."""


def parse_flags(argv: Sequence[str], prog: str) -> Flags:
    """Read a command line (without the program's name).

    Raises:
        ConfigError: an unknown flag, a missing, superfluous or bad value.
        SystemExit: with code 0, after printing the help that -h or --help asks for.
    """
    if "-h" in argv or "--help" in argv:
        tyro.cli(_help_class(), prog=prog, description=DESCRIPTION, args=["--help"])
    files: list[str] = []
    resume: str | None = None
    overrides: dict[str, object] = {}
    for flag, values in _split(argv):
        if flag == "--config":
            files.append(_only_value(flag, values, "a TOML file; repeat --config for another file"))
        elif flag == "--resume":
            resume = _only_value(flag, values or [LATEST], "at most one path")
        else:
            key, value = _read_override(flag, values)
            overrides[key] = value
    return Flags(config_files=tuple(files), resume=resume, overrides=overrides)


def _split(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Group a command line into flags, each with the values after it ("--a=b" is "--a b")."""
    groups: list[tuple[str, list[str]]] = []
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
    return groups


def _only_value(flag: str, values: list[str], wanted: str) -> str:
    """The one value of a flag."""
    if len(values) != 1 or not values[0]:
        got = " ".join(map(repr, values)) or "nothing"
        raise ConfigError(f"{flag}: takes {wanted}, got {got}")
    return values[0]


def _read_override(flag: str, values: list[str]) -> tuple[str, object]:
    """Dotted key and checked value of one settings flag."""
    key = flag.removeprefix("--").replace("-", "_")
    table, _, name = key.rpartition(".")
    positive = f"{table}.{name.removeprefix('no_')}"
    negated = key not in SETTINGS and positive in SETTINGS and SETTINGS[positive].kind is bool
    setting = SETTINGS.get(positive if negated else key)
    if setting is None:
        raise ConfigError(f"{flag}: unknown flag; {suggest_flag(key)}")
    try:
        if setting.kind is bool:
            value: object = _read_bool(setting, values, negated)
        elif len(values) != 1:
            got = " ".join(map(repr, values)) or "nothing"
            raise ConfigError(f"{setting.key} takes one value of type {setting.wanted}, got {got}")
        else:
            value = _read_value(setting, values[0])
        return setting.key, check_value(setting, value)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from None


def _read_bool(setting: Setting, values: list[str], negated: bool) -> bool:
    """Value of a switch: "--x", "--no-x", "--x true" or "--x false"."""
    if not values:
        return not negated
    word = values[0].lower()
    if negated or len(values) > 1 or word not in ("true", "false"):
        cure = f"write {setting.flag}, {_negative(setting)}, or {setting.flag} true|false"
        raise ConfigError(
            f"{setting.key!r} must be bool, got {' '.join(map(repr, values))}; {cure}"
        )
    return word == "true"


def _negative(setting: Setting) -> str:
    """Flag that turns a switch off, such as "--data.no-shuffle"."""
    table, _, name = setting.flag.rpartition(".")
    return f"{table}.no-{name}"


def _read_value(setting: Setting, text: str) -> object:
    """The value tyro reads from `text` for the setting's type; not yet checked."""
    if setting.kind is dict:
        return parse_table(setting.key, text)
    one_flag = dataclasses.make_dataclass("OneFlag", [("value", setting.kind)])
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # tyro prints a box of several lines
            return cast(Any, tyro.cli(one_flag, args=[f"--value={text}"])).value
    except SystemExit:
        raise ConfigError(f"{setting.key!r} must be {setting.wanted}, got {text!r}") from None


def field_docs(owner: type) -> dict[str, str]:
    """Text of the attribute docstring under each field of a dataclass that has one."""
    body = cast(ast.ClassDef, ast.parse(inspect.getsource(owner)).body[0]).body
    docs: dict[str, str] = {}
    for statement, following in itertools.pairwise(body):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = " ".join(text.split())
            case _:
                pass
    return docs


def _help_class() -> type:
    """A class with every flag, for tyro's help; its fields carry no checks."""
    files = Annotated[
        tuple[str, ...],
        tyro.conf.UseAppendAction,
        tyro.conf.arg(metavar="FILE", help="Config file; without one, train_configs/default.toml."),
    ]
    text = f'Continue from a checkpoint folder; without a path, from the newest ("{LATEST}").'
    resume = Annotated[str | None, tyro.conf.arg(metavar="[PATH]", help=text)]
    tables = [(name, _help_table(table)) for name, table in TABLES.items()]
    return dataclasses.make_dataclass(
        "AllFlags",
        [
            ("config", files, field(default=())),
            ("resume", resume, field(default=None)),
            *((name, table, field(default_factory=table)) for name, table in tables),
        ],
        kw_only=True,
    )


def _help_table(table: type[Table]) -> type:
    """One group of flags."""
    defaults, docs = table(), field_docs(table)
    members: list[tuple[str, Any, Any]] = []
    for name, setting in settings_of(table).items():
        kind: Any = Literal[setting.choices] if setting.choices else setting.kind  # pyright: ignore
        default = getattr(defaults, name)
        if setting.kind is dict:
            kind, default = str, "{}"
        bounds = f" Must be {setting.bounds}." if str(setting.bounds) else ""
        metavar = "{ KEY = VALUE }" if setting.kind is dict else None
        note = tyro.conf.arg(help=docs[name] + bounds, metavar=metavar)
        members.append((name, Annotated[kind, note], field(default=default)))
    built = dataclasses.make_dataclass(table.__name__, members, kw_only=True)
    built.__doc__ = table.__doc__
    return built
