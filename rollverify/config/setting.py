"""One setting: its type, the values it may take, and the check of a single value.

Rules that join several settings are in `check`; reading files and flags is in `load`.
"""

import functools
import math
import re
import typing
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from rollverify.errors import ConfigError


@dataclass(kw_only=True, slots=True, frozen=True)
class Range:
    """Numeric bounds of a setting, written in its annotation."""

    ge: float | None = None
    """Smallest allowed value."""
    gt: float | None = None
    """The value must be larger than this."""
    le: float | None = None
    """Largest allowed value."""
    lt: float | None = None
    """The value must be smaller than this."""
    special: int | None = None
    """One more allowed value outside the bounds, such as -1 for "derive it"."""
    allow_inf: bool = False
    """Whether infinity is allowed as well, for a limit that can be turned off."""

    def __contains__(self, value: float) -> bool:
        """Whether `value` is finite and within every bound, or is one of the allowed exceptions."""
        if self.special is not None and value == self.special:
            return True
        if self.allow_inf and value == math.inf:
            return True
        return (
            math.isfinite(value)
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def __str__(self) -> str:
        """The bounds in words, such as "> 0 and <= 1"."""
        bounds = ((">=", self.ge), (">", self.gt), ("<=", self.le), ("<", self.lt))
        words = " and ".join(f"{sign} {bound}" for sign, bound in bounds if bound is not None)
        exceptions = [str(self.special)] * (self.special is not None) + ["inf"] * self.allow_inf
        return ", or ".join(filter(None, [words, *exceptions]))


@dataclass(kw_only=True, slots=True, frozen=True)
class Setting:
    """What may be written for one key of one table."""

    table: str
    """Name of the TOML table."""
    name: str
    """Name of the key in the table."""
    kind: type
    """bool, int, float, str or dict."""
    choices: tuple[str, ...] = ()
    """The allowed strings of a `Literal`; empty when any value of the kind is allowed."""
    bounds: Range = Range()
    """Bounds of a number; the default only refuses nan and infinity."""

    @property
    def key(self) -> str:
        """Dotted key, such as "training.steps"."""
        return f"{self.table}.{self.name}"

    @property
    def flag(self) -> str:
        """Command line flag, such as "--rollout.group-size"."""
        return "--" + self.key.replace("_", "-")

    @property
    def wanted(self) -> str:
        """The type in the words of an error message."""
        return "a table" if self.kind is dict else self.kind.__name__


@dataclass(kw_only=True, slots=True, frozen=True)
class Table:
    """Base of every config table: checks type and bounds of each field when it is built."""

    def __post_init__(self) -> None:
        """Refuse bad values; store an int given for a float as a float."""
        for name, setting in settings_of(type(self)).items():
            object.__setattr__(self, name, check_value(setting, getattr(self, name)))


def table_name(table: type[Table]) -> str:
    """TOML name of a table class: `WeightSyncConfig` is `weight_sync`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", table.__name__.removesuffix("Config")).lower()


@functools.cache
def settings_of(table: type[Table]) -> dict[str, Setting]:
    """The settings of a table class, by field name, in declaration order."""
    hints = typing.get_type_hints(table, include_extras=True)
    name = table_name(table)
    return {field.name: _setting(name, field.name, hints[field.name]) for field in fields(table)}


def _setting(table: str, name: str, hint: object) -> Setting:
    """Read one annotation: a plain type, `Annotated[type, Range(...)]`, `Literal`, or a dict."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return Setting(table=table, name=name, kind=str, choices=arguments)
    if origin is Annotated:
        return Setting(table=table, name=name, kind=arguments[0], bounds=arguments[1])
    kind = origin or hint
    if not isinstance(kind, type) or kind not in (bool, int, float, str, dict):
        raise TypeError(f"{table}.{name}: a setting cannot be of type {hint!r}")
    return Setting(table=table, name=name, kind=kind)


def check_value(setting: Setting, value: object) -> object:
    """The value as it is stored: an int given for a float becomes a float, the rest is unchanged.

    Raises:
        ConfigError: wrong type (a bool is not an int), outside a Literal, outside the bounds, nan,
            infinite where that is not allowed, or a text with a NUL.
    """
    if setting.kind is float and type(value) is int:
        value = _to_float(value)
    if type(value) is not setting.kind:
        got = f"{type(value).__name__} {shorten(value)}"
        cure = "; write inf without quotes" if setting.bounds.allow_inf and value == "inf" else ""
        raise ConfigError(f"'{setting.key}' must be {setting.wanted}, got {got}{cure}")
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"'{setting.key}' must not hold a NUL character, got {shorten(value)}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value not in setting.bounds:
            is_odd = not math.isfinite(value) and not setting.bounds.allow_inf
            rule = " and ".join(filter(None, ("finite" if is_odd else "", str(setting.bounds))))
            raise ConfigError(f"{setting.key} must be {rule}, got {shorten(value)}")
    elif setting.choices and value not in setting.choices:
        choices = ", ".join(repr(choice) for choice in setting.choices)
        raise ConfigError(f"'{setting.key}' must be one of [{choices}], got {shorten(value)}")
    return value


def _to_float(value: int) -> float:
    """The int as a float; infinity when it is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def shorten(value: object) -> str:
    """`repr` of a value on one line, cut after 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
