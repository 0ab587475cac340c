"""Arms x seeds -> runs, each with its place on disk and its command line. Starts and reads nothing.

The run folder of arm a with seed s lies below `<root>/<study>/<a>/seed-<s>`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rollverify.config.dump import diff, toml_value
from rollverify.config.load import load_config, read_file
from rollverify.config.tables import Config
from rollverify.errors import ConfigError
from rollverify.study.definition import Arm, Study

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(kw_only=True, slots=True, frozen=True)
class PlannedRun:
    """One run of a study."""

    arm: str
    seed: int
    place: Path
    """Folder that holds the run folder, and the log of its output."""
    argv: tuple[str, ...]
    """Command line of a new run, without the program."""
    config: Config
    """What that command line means."""

    @property
    def name(self) -> str:
        """Arm and seed, for messages."""
        return f"{self.arm}, seed {self.seed}"


def plan_runs(study: Study, root: Path) -> list[PlannedRun]:
    """Every run, all arms of the first seed first, so that each seed is a whole comparison.

    Args:
        study: arms and seeds.
        root: folder below which studies keep their runs.

    Raises:
        ConfigError: an arm's config does not load, or a setting of the study is changed by a config
            file of the arm, which it would silently win over.
    """
    return [_planned(study, arm, seed, root) for seed in study.seeds for arm in study.arms]


def narrowed(study: Study, arms: Sequence[str], seeds: Sequence[int]) -> Study:
    """The study with only some arms and seeds; an empty list keeps all. Claims are kept whole.

    Raises:
        ConfigError: an arm or a seed that the study does not have.
    """
    unknown = [one for one in arms if one not in {arm.name for arm in study.arms}]
    unknown += [str(one) for one in seeds if one not in study.seeds]
    if unknown:
        raise ConfigError(f"study {study.name} has no arm or seed {', '.join(unknown)}")
    return replace(
        study,
        arms=tuple(arm for arm in study.arms if not arms or arm.name in arms),
        seeds=tuple(seed for seed in study.seeds if not seeds or seed in seeds),
    )


def changed_by(arm: Arm, baseline: Arm) -> list[str]:
    """Settings that an arm changes against another one, as lines "key: theirs -> ours"."""
    changed = diff(_config_of(baseline), _config_of(arm))
    return [line for line in changed if not line.startswith("run.name: ")]


def as_flags(settings: Mapping[str, object]) -> list[str]:
    """Settings as words of a command line."""
    words: list[str] = []
    for key, value in settings.items():
        text = value if isinstance(value, str) else toml_value(value)
        words += ["--" + key.replace("_", "-"), text]
    return words


def _planned(study: Study, arm: Arm, seed: int, root: Path) -> PlannedRun:
    place = root / (arm.runs_of or study.name) / arm.name / f"seed-{seed}"
    own = {"run.name": arm.name, "run.seed": seed, "run.output_dir": place.as_posix()}
    try:
        argv = _arguments(arm) + as_flags(own)
        config = load_config(argv).config
    except ConfigError as error:
        raise ConfigError(f"arm {arm.name}: {error}") from None
    return PlannedRun(arm=arm.name, seed=seed, place=place, argv=tuple(argv), config=config)


def _arguments(arm: Arm) -> list[str]:
    files = [_found(file) for file in arm.config_files]
    for file in files[1:]:
        keys = {f"{table}.{key}" for table, values in read_file(file).items() for key in values}
        for key in sorted(keys & arm.inherited):
            raise ConfigError(
                f"{key} is set by {file} and by the study's settings, which would win; "
                "repeat it in the arm's settings or leave it out of the study's"
            )
    return [word for file in files for word in ("--config", file)] + as_flags(arm.settings)


def _found(file: str) -> str:
    """The file here, or in the repository."""
    beside = REPOSITORY / file
    return str(beside) if not Path(file).is_file() and beside.is_file() else file


def _config_of(arm: Arm) -> Config:
    return load_config(_arguments(arm)).config
