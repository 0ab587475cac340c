"""A study file: the question, the arms and what each changes, the seeds, the claims to be tested.

Does not load the configs of the arms (`plan` does), nor judge a claim (`claims` does).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import tomli

from rollverify.errors import ConfigError

DEFAULT_RATIOS = (0.002, 0.005, 0.01)
"""Costs of one more active sequence over those of an empty decode step, as on GPUs."""

CLAIM_KINDS = {
    "accuracy_below": {"arm", "other"},
    "accuracy_within_spread": {"arm", "other"},
    "fewer_decode_steps": {"arm", "other", "factor"},
    "cheaper": {"arm", "other", "factor", "ratio"},
    "ops_order": {"arms"},
}
"""Keys that each kind of claim needs besides `text` and `kind`."""

_STUDY_KEYS = {"question", "seeds", "baseline", "config_files", "settings", "arms"}
_STUDY_KEYS |= {"claims", "ratios", "minutes_per_run"}
_ARM_KEYS = {"name", "label", "config_files", "settings", "runs_of"}


@dataclass(kw_only=True, slots=True, frozen=True)
class Arm:
    """One of the things that are compared."""

    name: str
    """Name of its folder and in files of numbers."""
    label: str
    """Name in tables and plots."""
    config_files: tuple[str, ...]
    """Config files, left to right, those of the study first."""
    settings: Mapping[str, object]
    """Values by dotted key, over the files; the arm's own over those of the study."""
    inherited: frozenset[str] = frozenset()
    """Keys of the settings that are those of the study."""
    runs_of: str = ""
    """Another study whose runs of this very arm are used, so that they are made once."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Claim:
    """An expectation that was written down before the runs; see `CLAIM_KINDS`."""

    text: str
    kind: str
    arms: tuple[str, ...]
    """The arms it is about, in order: [arm, other], or all that are ordered."""
    factor: float = 1.0
    ratio: float = 0.0


@dataclass(kw_only=True, slots=True, frozen=True)
class Study:
    """What a study file says."""

    name: str
    """The file's name without its suffix."""
    question: str
    """What the study is to answer, in a sentence or two."""
    seeds: tuple[int, ...]
    """Values of run.seed."""
    baseline: str
    """Arm that costs are compared with."""
    arms: tuple[Arm, ...]
    claims: tuple[Claim, ...]
    ratios: tuple[float, ...]
    """Values of c1 / c0 that costs are computed for."""
    minutes_per_run: float
    """A guess for the estimate, until runs have been measured."""


def read_study(path: Path) -> Study:
    """Read a study file.

    Raises:
        ConfigError: it cannot be read, lacks a key, or holds one that is not known.
    """
    try:
        document = tomli.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    try:
        return study_from(document, path.stem)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def study_from(document: Mapping[str, Any], name: str) -> Study:
    """The study of a parsed document.

    Raises:
        ConfigError: see `read_study`.
    """
    _check_keys("the study", document, _STUDY_KEYS, {"question", "seeds", "baseline", "arms"})
    files = _strings("config_files", document.get("config_files", ["train_configs/default.toml"]))
    common = flat_settings(document.get("settings", {}))
    arms = tuple(_arm(entry, files, common) for entry in document["arms"])
    names = [arm.name for arm in arms]
    if len(set(names)) < len(names):
        raise ConfigError(f"two arms have the same name: {', '.join(sorted(names))}")
    seeds = document["seeds"]
    if not isinstance(seeds, list) or not seeds or not all(type(one) is int for one in seeds):
        raise ConfigError(f"'seeds' must be a list of whole numbers, got {seeds!r}")
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"'seeds' names a seed twice: {seeds}")
    study = Study(
        name=name,
        question=str(document["question"]).strip(),
        seeds=tuple(seeds),
        baseline=str(document["baseline"]),
        arms=arms,
        claims=tuple(_claim(entry, set(names)) for entry in document.get("claims", [])),
        ratios=tuple(float(one) for one in document.get("ratios", DEFAULT_RATIOS)),
        minutes_per_run=float(document.get("minutes_per_run", 5)),
    )
    if study.baseline not in names:
        raise ConfigError(f"baseline {study.baseline!r} is not an arm; arms: {', '.join(names)}")
    return study


def flat_settings(tables: Mapping[str, Any]) -> dict[str, object]:
    """{"training": {"steps": 3}} -> {"training.steps": 3}.

    Raises:
        ConfigError: an entry is not in a table.
    """
    settings: dict[str, object] = {}
    for table, entries in tables.items():
        if not isinstance(entries, dict):
            raise ConfigError(f"settings: {table!r} must be a table, such as training.steps = 3")
        settings |= {f"{table}.{key}": value for key, value in entries.items()}
    return settings


def _arm(entry: Mapping[str, Any], files: tuple[str, ...], common: Mapping[str, object]) -> Arm:
    name = str(entry.get("name", "without a name"))
    _check_keys(f"arm {name}", entry, _ARM_KEYS, {"name"})
    own_files = _strings("config_files", entry.get("config_files", []))
    own = flat_settings(entry.get("settings", {}))
    return Arm(
        name=name,
        label=str(entry.get("label", name.replace("_", " "))),
        config_files=(*files, *own_files),
        settings={**common, **own},
        inherited=frozenset(common.keys() - own.keys()),
        runs_of=str(entry.get("runs_of", "")),
    )


def _claim(entry: Mapping[str, Any], names: set[str]) -> Claim:
    kind = str(entry.get("kind"))
    if kind not in CLAIM_KINDS:
        raise ConfigError(f"unknown kind of claim {kind!r}; known: {', '.join(CLAIM_KINDS)}")
    needed = {"text", "kind"} | CLAIM_KINDS[kind]
    _check_keys(f"claim {kind}", entry, needed, needed)
    arms = _strings("arms", entry["arms"]) if "arms" in entry else (entry["arm"], entry["other"])
    unknown = sorted(set(arms) - names)
    if unknown:
        raise ConfigError(f"claim {kind} names no arm of this study: {', '.join(unknown)}")
    return Claim(
        text=str(entry["text"]),
        kind=kind,
        arms=arms,
        factor=float(entry.get("factor", 1.0)),
        ratio=float(entry.get("ratio", 0.0)),
    )


def _check_keys(
    owner: str, entry: Mapping[str, Any], allowed: set[str], required: set[str]
) -> None:
    unknown, lacking = sorted(set(entry) - allowed), sorted(required - set(entry))
    if unknown:
        known = ", ".join(sorted(allowed))
        raise ConfigError(f"{owner} has unknown keys {', '.join(unknown)}; known: {known}")
    if lacking:
        raise ConfigError(f"{owner} lacks {', '.join(lacking)}")


def _strings(key: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ConfigError(f"{key!r} must be a list of strings, got {value!r}")
    return tuple(cast(list[str], value))
