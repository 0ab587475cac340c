"""Where a run lives on disk: config.toml, config.json, checkpoints/, tb/, metrics.jsonl, model/."""

import os
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollverify.config.dump import diff, to_json, to_toml
from rollverify.config.load import LoadedConfig, load_config
from rollverify.config.tables import Config
from rollverify.errors import CheckpointError, ConfigError
from rollverify.files import write_atomic

if TYPE_CHECKING:  # the launcher reads folders without torch
    from rollverify.ranks import Ranks

CONFIG_TOML = "config.toml"
LATEST = "latest"
SHARED_WITHIN_S = 10.0
"""After which a file of another machine must be seen."""


def resolve(argv: Sequence[str]) -> tuple[LoadedConfig, Path | None]:
    """The config of a command line and, with --resume, the folder of the run to go on with.

    Without --config a resumed run takes the config that its folder holds; flags still win.
    """
    loaded = load_config(argv)
    if loaded.resume is None:
        return loaded, None
    folder = find_run(loaded.config, loaded.resume)
    if not any(word == "--config" or word.startswith("--config=") for word in argv):
        if not (folder / CONFIG_TOML).is_file():
            raise CheckpointError(f"{folder} holds no {CONFIG_TOML}; give --config as well")
        loaded = load_config(["--config", str(folder / CONFIG_TOML), *argv])
    return loaded, folder


def find_run(config: Config, resume: str, flag: str = "--resume") -> Path:
    """Folder of a run: as named by `flag`, or "latest", the newest one with checkpoints."""
    if resume != LATEST:
        folder = Path(resume)
        if not folder.is_dir():
            raise CheckpointError(f"{flag}: '{resume}' is not a folder; give a run folder")
        return folder
    output = Path(config.run.output_dir)
    runs = [path.parent for path in output.glob("*/checkpoints") if path.is_dir()]
    if not runs:
        raise CheckpointError(
            f"{flag}: no run with checkpoints below '{output}'; name its folder after {flag}, or "
            "start one without it"
        )
    return max(runs, key=lambda run: (run / "checkpoints").stat().st_mtime)


def create(config: Config) -> Path:
    """Make a new, empty run folder. Call on one rank."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    base = Path(config.run.output_dir) / f"{config.run.name}-{stamp}"
    for attempt in range(100):
        folder = base if attempt == 0 else base.with_name(f"{base.name}-{attempt + 1}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(
                f"run.output_dir '{config.run.output_dir}' cannot be written "
                f"({error.strerror}); choose another with --run.output-dir"
            ) from error
    raise ConfigError(f"100 runs are called {base}; choose another run.name")


def open_together(config: Config, resumed: Path | None, world: "Ranks") -> Path:
    """The folder of a resumed run, or a new one, seen by all ranks. Collective."""
    folder = resumed or create_together(config, world)
    check_shared(folder, config, world)
    return folder


def create_together(config: Config, world: "Ranks") -> Path:
    """Rank 0 makes the run folder (or its error) and the others learn of it. Collective."""
    found: Path | ConfigError | None = None
    if world.rank == 0:
        try:
            found = create(config)
        except ConfigError as error:
            found = error
    found = world.from_first(found)
    if isinstance(found, ConfigError):
        raise found
    assert found is not None
    return found


def check_shared(folder: Path, config: Config, world: "Ranks") -> None:
    """Refuse a run folder that some machine does not see, and other settings there. Collective.

    Every rank writes its part of a checkpoint into the folder. One machine has nothing to check.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", world.size)) >= world.size:
        return
    hosts = world.gather(socket.gethostname())
    first, *others = world.gather(config)
    for rank, (host, other) in enumerate(zip(hosts[1:], others, strict=True), start=1):
        keys = [line.partition(":")[0] for line in diff(first, other)]
        if keys:
            raise ConfigError(
                f"rank {rank} on {host} was started with other settings than rank 0 on {hosts[0]} "
                f"({', '.join(keys[:3])}); give every node the same"
            )
    token = world.from_first(secrets.token_hex(8))
    file = folder / f".shared-{token}"
    if world.rank == 0:
        write_atomic(file, token)
    world.from_first(None)
    unseen = [rank for rank, seen in enumerate(world.gather(_appears(file))) if not seen]
    if world.rank == 0:
        file.unlink(missing_ok=True)
    if unseen:
        raise ConfigError(
            f"rank {unseen[0]} on {hosts[unseen[0]]} does not see {folder}, the run folder of rank "
            f"0 on {hosts[0]}; several nodes need storage that all share: give its path, the same "
            "everywhere, as --run.output-dir"
        )


def _appears(file: Path) -> bool:
    """Whether a file is there, maybe late: folders of network storage are cached."""
    deadline = time.monotonic() + SHARED_WITHIN_S
    while not file.is_file():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def changed_settings(folder: Path, config: Config) -> list[str]:
    """Lines `key: old -> new` against the config the folder holds; none in a new run's folder."""
    file = folder / CONFIG_TOML
    if not file.is_file():
        return []
    return diff(load_config(["--config", str(file)]).config, config)


def write_config(folder: Path, config: Config) -> None:
    """Write the resolved config as TOML, to start from, and as JSON, to compare."""
    try:
        for name, text in ((CONFIG_TOML, to_toml(config)), ("config.json", to_json(config))):
            write_atomic(folder / name, text)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({error.strerror})") from error
