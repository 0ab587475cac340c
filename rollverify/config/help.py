"""The text of --help: every flag with its type, its docstring, its bounds and its default."""

import dataclasses
import sys
from typing import Annotated, Any, NoReturn, get_origin

import tyro

from rollverify.config.losses import UNIONS
from rollverify.config.tables import SETTINGS, Config, classes_of

DESCRIPTION = (
    "Settings come from the schema's defaults, then the --config files from left to right, then "
    "the flags below; later ones win. Flags may be written with '-' or '_'. The defaults shown are "
    "those of the schema."
)
SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "multiple_of": "a multiple of"}


def print_help(prog: str) -> NoReturn:
    """Print the help and leave with code 0."""
    files = Annotated[
        tuple[str, ...],
        tyro.conf.UseAppendAction,
        tyro.conf.arg(metavar="FILE", help="Config file; without one, train_configs/default.toml."),
    ]
    text = 'Continue from a checkpoint folder; without a path, from the newest ("latest").'
    resume = Annotated[str | None, tyro.conf.arg(metavar="[PATH]", help=text)]
    flags = dataclasses.make_dataclass(
        "Flags",
        [
            ("config", files, dataclasses.field(default=())),
            ("resume", resume, dataclasses.field(default=None)),
            *((table, _flags_of(table)) for table in Config.model_fields),
        ],
        kw_only=True,
    )
    tyro.cli(flags, prog=prog, description=DESCRIPTION, args=["--help"])
    sys.exit(0)


_WRITTEN: dict[Any, tuple[str, str]] = {
    dict: ("{}", "{ KEY = VALUE }"),
    list: ("[]", "[VALUE, ...]"),
}
"""Default, and how values look, of settings that hold several."""


def _flags_of(table: str) -> type:
    fields: list[tuple[str, Any, Any]] = []
    for name in dict.fromkeys(key for kind in classes_of(table) for key in kind.model_fields):
        setting = SETTINGS[f"{table}.{name}"]
        # Tables and lists are written as in TOML, in one word.
        empty, shape = _WRITTEN.get(get_origin(setting.annotation), (None, None))
        kind = setting.annotation if empty is None else str
        note = tyro.conf.arg(help=_text(table, name), metavar=shape)
        default = dataclasses.field(default=setting.default if empty is None else empty)
        fields.append((name, Annotated[kind, note], default))  # pyright: ignore
    group = dataclasses.make_dataclass(table, fields, kw_only=True)
    group.__doc__ = classes_of(table)[0].__doc__
    return group


def _text(table: str, name: str) -> str:
    """Docstring and bounds; with the name of each loss or correction where they differ."""
    texts: dict[str, list[str]] = {}
    for kind in classes_of(table):
        setting = kind.model_fields.get(name)
        if setting is None or setting.description is None:
            continue
        bounds = [
            f"{sign} {bound:g}"
            for rule in setting.metadata
            for limit, sign in SIGNS.items()
            if (bound := getattr(rule, limit, None)) is not None and abs(bound) < 1e9
        ]
        limits = f" Must be {' and '.join(bounds)}." if bounds else ""
        if any(getattr(rule, "allow_inf_nan", False) for rule in setting.metadata):
            limits = limits.replace(".", ", or inf.")
        text = " ".join(setting.description.split()) + limits
        owner = kind.model_fields["name"].default if table in UNIONS else ""
        texts.setdefault(text, []).append(owner if isinstance(owner, str) else "your own")
    if table not in UNIONS or name in classes_of(table)[0].model_fields:
        return " ".join(texts)
    return " ".join(f"{', '.join(owners)}: {text}" for text, owners in texts.items())
