"""A study file: the question, the arms, what each changes, the seeds, the claims to be tested."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import tomli
from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from rollverify.errors import ConfigError
from rollverify.study.claims import CLAIM_KINDS, Claim


def flat_settings(tables: Any) -> dict[str, object]:
    """{"training": {"steps": 3}} -> {"training.steps": 3}."""
    settings: dict[str, object] = {}
    for table, entries in tables.items() if isinstance(tables, dict) else [("settings", tables)]:
        if not isinstance(entries, dict):
            raise ValueError(f"{table!r} must be a table, such as training.steps = 3")
        settings |= {f"{table}.{key}": value for key, value in entries.items()}
    return settings


Settings = Annotated[dict[str, object], BeforeValidator(flat_settings)]


class Arm(BaseModel, extra="forbid", strict=True, frozen=True):
    """One of the things that are compared."""

    name: str
    """Name of its folder and in files of numbers."""
    label: str = Field(default_factory=lambda data: data["name"].replace("_", " "))
    """Name in tables and plots."""
    config_files: list[str] = []
    """Config files, left to right, over those of the study."""
    settings: Settings = {}
    """Values by dotted key, over those of the study, which are over all files."""
    runs_of: str = ""
    """Another study whose runs of this very arm are used, so that they are made once."""


class Study(BaseModel, extra="forbid", strict=True, str_strip_whitespace=True):
    """What a study file says."""

    _name: str = ""
    question: str
    """What the study is to answer, in a sentence or two."""
    seeds: list[int] = Field(min_length=1)
    baseline: str
    """Arm that costs are compared with."""
    config_files: list[str] = ["train_configs/default.toml"]
    settings: Settings = {}
    arms: list[Arm] = Field(min_length=1)
    claims: list[Claim] = []
    ratios: list[float] = Field([0.002, 0.005, 0.01], min_length=1)
    """Values of c1 / c0 of the cost model that costs are computed for; by default as on GPUs."""
    minutes_per_run: float = 5.0
    """A guess for the estimate, until runs have been measured."""

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return self._name

    def files_of(self, arm: Arm) -> list[str]:
        """Config files of an arm, left to right."""
        return [*self.config_files, *arm.config_files]

    def settings_of(self, arm: Arm) -> dict[str, object]:
        """Settings of an arm over its files."""
        return {**self.settings, **arm.settings}

    @model_validator(mode="after")
    def _check_names(self) -> "Study":
        names = [arm.name for arm in self.arms]
        if len(set(names)) < len(names):
            raise ValueError(f"two arms have the same name: {', '.join(sorted(names))}")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"'seeds' names a seed twice: {self.seeds}")
        if self.baseline not in names:
            raise ValueError(f"baseline {self.baseline!r} is not an arm; arms: {', '.join(names)}")
        for claim in self.claims:
            unknown = ", ".join(sorted({*claim.names} - {*names}))
            if unknown:
                raise ValueError(f"claim {claim.kind} names no arm of this study: {unknown}")
        return self


def read_study(path: Path) -> Study:
    """Read a study file."""
    try:
        return study_from(tomli.loads(path.read_text(encoding="utf-8")), path.stem)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def study_from(document: Mapping[str, Any], name: str) -> Study:
    """The study of a parsed document."""
    try:
        study = Study.model_validate(document)
    except ValidationError as error:
        # A label that could not be made from a missing name says nothing new.
        found = [e for e in error.errors() if e["type"] != "default_factory_not_called"]
        raise ConfigError("; ".join(_words(e, document) for e in found)) from None
    study._name = name
    return study


def _words(error: ErrorDetails, document: Mapping[str, Any]) -> str:
    """One mistake, such as "arm a: unknown key 'setings'; did you mean 'settings'?"."""
    loc, owner, model = list(error["loc"]), "", Study
    if loc[0:1] == ["arms"] and loc[1:]:
        entry = document["arms"][loc[1]]
        name = entry.get("name") if isinstance(entry, dict) else None
        owner, model, loc = f"arm {name or f'number {int(loc[1]) + 1}'}: ", Arm, loc[2:]
    elif loc[0:1] == ["claims"] and loc[1:]:
        kind = str(loc[2]) if loc[2:] else ""
        owner, model, loc = f"claim number {int(loc[1]) + 1}: ", CLAIM_KINDS.get(kind), loc[3:]
    key, message = ".".join(map(str, loc)), error["msg"].removeprefix("Value error, ")
    if error["type"] == "extra_forbidden" and model:
        near = difflib.get_close_matches(key, model.model_fields, n=1)
        cure = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(model.model_fields)}"
        return f"{owner}unknown key {key!r}; {cure}"
    if error["type"] == "missing":
        return f"{owner}{key!r} is missing"
    if error["type"].startswith("union_tag"):
        kind = error["input"].get("kind") if isinstance(error["input"], dict) else None
        return f"{owner}unknown kind of claim {kind!r}; known: {', '.join(CLAIM_KINDS)}"
    if error["type"] == "value_error":
        return owner + message
    where = f"{owner}{key!r}: " if key else owner
    return f"{where}{message[0].lower()}{message[1:]}, got {error['input']!r}"
