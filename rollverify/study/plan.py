"""Arms x seeds -> runs, each with its config and its place, <root>/<study>/<arm>/seed-<seed>."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollverify.config.dump import diff
from rollverify.config.load import read_config, read_file
from rollverify.config.tables import Config
from rollverify.errors import ConfigError
from rollverify.study.study_file import Arm, Study, flat_settings

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(kw_only=True, slots=True, frozen=True)
class PlannedRun:
    """One run of a study."""

    arm: str
    seed: int
    place: Path
    """Folder of its config file, of the run folder, and of the log of its output."""
    config: Config

    @property
    def name(self) -> str:
        """Arm and seed, for messages."""
        return f"{self.arm}, seed {self.seed}"


def plan_runs(study: Study, root: Path) -> list[PlannedRun]:
    """Every run, all arms of the first seed first, so that each seed is a whole comparison."""
    runs = []
    for seed in study.seeds:
        for arm in study.arms:
            place = root / (arm.runs_of or study.name) / arm.name / f"seed-{seed}"
            own = {"run.name": arm.name, "run.seed": seed, "run.output_dir": place.as_posix()}
            config = config_of(study, arm, own)
            runs.append(PlannedRun(arm=arm.name, seed=seed, place=place, config=config))
    return runs


def config_of(study: Study, arm: Arm, own: Mapping[str, object] | None = None) -> Config:
    """The config of an arm: its files, over them the settings of the study, its own, and `own`.

    A setting of the study that a config file of the arm changes is a ConfigError.
    """
    document: dict[str, dict[str, object]] = {}
    for key, value in {**study.settings_of(arm), **(own or {})}.items():
        table, _, name = key.partition(".")
        document.setdefault(table, {})[name] = value
    try:
        config = read_config([_found(file) for file in study.files_of(arm)], document)
    except ConfigError as error:
        raise ConfigError(f"arm {arm.name}: {error}") from None
    for file in map(_found, arm.config_files):
        in_file = flat_settings(read_file(file))
        for key in sorted(in_file.keys() & study.settings.keys() - arm.settings.keys()):
            raise ConfigError(
                f"arm {arm.name}: {key} is set by {file} and by the study's settings, which would "
                "win; repeat it in the arm's settings or leave it out of the study's"
            )
    return config


def _found(file: str) -> str:
    """The file here, or in the repository."""
    beside = REPOSITORY / file
    return str(beside) if not Path(file).is_file() and beside.is_file() else file


def narrowed(study: Study, arms: Sequence[str], seeds: Sequence[int]) -> Study:
    """The study with only some arms and seeds; an empty list keeps all. Claims are kept whole."""
    kept_arms = [arm for arm in study.arms if not arms or arm.name in arms]
    kept_seeds = [seed for seed in study.seeds if not seeds or seed in seeds]
    unknown = [name for name in arms if name not in {arm.name for arm in kept_arms}]
    unknown += [str(seed) for seed in seeds if seed not in kept_seeds]
    if unknown:
        raise ConfigError(f"study {study.name} has no arm or seed {', '.join(unknown)}")
    return study.model_copy(update={"arms": kept_arms, "seeds": kept_seeds})


def changed_by(study: Study, arm: Arm, baseline: Arm) -> list[str]:
    """Settings that an arm changes against another one, as lines "key: theirs -> ours"."""
    lines = diff(config_of(study, baseline), config_of(study, arm))
    return [line for line in lines if not line.startswith("run.name:")]
