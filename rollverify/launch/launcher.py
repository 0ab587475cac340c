"""Front end of a run: checks the config, prepares the base model if needed, starts the ranks.

It imports no torch, so a typo in a config costs a second. It owns every process of the run on its
machine: signals reach them once, and none outlives it. One rank is a plain child; more ranks go
through torchrun.
"""

import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rollverify.checkpoint.run_folder import resolve
from rollverify.config.environment import DEFAULTS
from rollverify.config.rules import check_world_size
from rollverify.errors import (
    FAILURE_EXIT_CODE,
    USER_ERROR_EXIT_CODE,
    ConfigError,
    RollVerifyError,
    exit_code,
)
from rollverify.launch.nodes import Nodes, read_nodes
from rollverify.launch.processes import TOKEN_VARIABLE, end_processes, start_guard
from rollverify.launch.shutdown import (
    ERROR_DIR_VARIABLE,
    RankError,
    die_with_parent,
    left_early,
    read_rank_errors,
    stop_grace_s,
)

ERROR_GRACE_S = 3.0
"""Seconds from one rank's report of an error to the end of all ranks."""

POLL_S = 0.05

DRY_RUN = "--dry-run"
"""Flag that plans the job, see `dry_run`, and starts nothing."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Modules:
    """What the launcher starts with `python -m`, by module name."""

    train: str = "rollverify.train"
    """Runs on every rank."""
    prepare: str = "rollverify.toy.base_model"
    """Runs on one rank, first, if the config names no model."""


class Supervisor:
    """Starts a run's processes one stage after the other, and ends whatever is left of them."""

    def __init__(self) -> None:
        self.signals: list[int] = []
        """Signals received so far, in order."""
        self._token = secrets.token_hex(16)

    def __enter__(self) -> "Supervisor":
        self.folder = Path(tempfile.mkdtemp(prefix="rollverify-"))
        self._guard = start_guard(self._token, self.folder)
        self._old_handlers = {
            number: signal.signal(number, self._note)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN  # nohup
        }
        return self

    def __exit__(self, *_: object) -> None:
        """End every process of the run; the guard does it, as it would if we were killed."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def run(self, command: Sequence[str], variables: Mapping[str, str]) -> int:
        """Run one stage, with variables over ours, to its end and end all that is left of it.

        Returns the exit code as `subprocess` gives it, negative if a signal ended the stage.
        """
        mine = {TOKEN_VARIABLE: self._token, ERROR_DIR_VARIABLE: str(self.folder)}
        child = subprocess.Popen(
            command,
            env={**DEFAULTS, **os.environ, **variables, **mine},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal reaches us, and we pass it on, once
            preexec_fn=die_with_parent,
        )
        deadline = math.inf
        has_forwarded = False
        while child.poll() is None and len(self.signals) < 2 and time.monotonic() < deadline:
            if self.signals and not has_forwarded:
                has_forwarded = True
                deadline = time.monotonic() + stop_grace_s()
                # SIGTERM for every signal: while Python is still importing, SIGINT is a traceback.
                child.send_signal(signal.SIGTERM)
            if deadline == math.inf and any(self.folder.glob("rank-*.json")):
                deadline = time.monotonic() + ERROR_GRACE_S
            time.sleep(POLL_S)
        end_processes(self._token)
        return child.wait()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signals.append(number)


def rank_stage(module: str, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Command and variables of a stage with a single rank.

    Port 0: the rank's store takes one that the system chooses while it binds. Looking a free port
    up first would leave a gap for another run to take it.
    """
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return [sys.executable, "-m", module, *argv], variables


def torchrun_stage(
    module: str, argv: Sequence[str], ranks: int, nodes: Nodes
) -> tuple[list[str], dict[str, str]]:
    """Command and variables of a stage with several ranks, so many here, on one node or more."""
    options = ["--nproc-per-node", str(ranks), "--rdzv-backend", "static"]
    options += ["--nnodes", str(nodes.count), "--node-rank", str(nodes.rank)]
    options += ["--master-addr", nodes.address, "--master-port", str(nodes.port)]
    options += ["--max-restarts", "0", "--shutdown-timeout", str(math.ceil(stop_grace_s()))]
    command = [sys.executable, "-m", "rollverify.launch.agent", *options, "--module", module, *argv]
    return command, {}


def launch(
    argv: Sequence[str],
    ranks: int,
    *,
    needs_prepare: bool,
    modules: Modules | None = None,
    nodes: Nodes | None = None,
) -> int:
    """Run this node's part of a job, so many ranks, and print the first cause last if one fails.

    Returns 0; 2 for user errors; 128 + signal if asked to stop; otherwise 1.
    """
    nodes = nodes or Nodes()
    modules = modules or Modules()
    stages = [(modules.prepare, rank_stage(modules.prepare, argv))] if needs_prepare else []
    if ranks * nodes.count == 1:
        stages.append((modules.train, rank_stage(modules.train, argv)))
    else:
        stages.append((modules.train, torchrun_stage(modules.train, argv, ranks, nodes)))
    with Supervisor() as supervisor:
        for name, (command, variables) in stages:
            code = supervisor.run(command, variables)
            errors = read_rank_errors(supervisor.folder)
            if supervisor.signals:
                first = signal.Signals(supervisor.signals[0])
                print(f"stopped by {first.name}", file=sys.stderr, flush=True)
                return 128 + first
            if errors:
                return _print_errors(errors, ranks * nodes.count)
            if code != 0:
                return _print_exit(name, code)
            early = left_early(supervisor.folder)
            if early:
                print(f"error: rank {early[0]} left before the end", file=sys.stderr, flush=True)
                return FAILURE_EXIT_CODE
    return 0


def _print_errors(errors: Sequence[RankError], ranks: int) -> int:
    """Print the reports, the first cause last; returns the exit code."""
    first, *later = errors
    for error in later:
        print(f"rank {error.rank} failed too: {error.message}", file=sys.stderr)
    if first.kind == "internal" and first.traceback:
        print(first.traceback, file=sys.stderr)
    where = f"rank {first.rank}: " if ranks > 1 else ""
    print(f"error: {where}{first.message}", file=sys.stderr, flush=True)
    return USER_ERROR_EXIT_CODE if first.kind == "user" else FAILURE_EXIT_CODE


def _print_exit(name: str, code: int) -> int:
    """Say how a stage without a report ended; returns the exit code."""
    if code == USER_ERROR_EXIT_CODE:  # it has already said why
        return code
    if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        print(f"stopped by {signal.Signals(code - 128).name}, which reached another node or rank")
        return code
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    hint = "; the kernel does this when memory runs out" if code == -signal.SIGKILL else ""
    print(f"error: {name} {how} without a report{hint}", file=sys.stderr, flush=True)
    return FAILURE_EXIT_CODE


def _split(argv: Sequence[str]) -> tuple[int, list[str]]:
    """`--nproc N -- flags...` -> N and the flags."""
    if len(argv) < 3 or argv[0] != "--nproc" or argv[2] != "--":
        raise ConfigError("usage: python -m rollverify.launch --nproc N -- [training flags]")
    if not argv[1].isascii() or not argv[1].isdigit() or int(argv[1]) < 1:
        raise ConfigError(f"NGPU (--nproc) must be a whole number >= 1, got {argv[1]!r}")
    return int(argv[1]), list(argv[3:])


def _dry_run(ranks: int, flags: Sequence[str]) -> int:
    """Plan a job instead of running it; a --world-size among the flags wins over the ranks here."""
    from rollverify.dry_run import check as dry_run

    return dry_run.main(["--world-size", str(ranks), *flags])


def main(argv: Sequence[str]) -> int:
    """Check the command line, then run the job or plan it; returns the exit code."""
    try:
        ranks, job = _split(argv)
        nodes = read_nodes(os.environ)
        if DRY_RUN in job:
            return _dry_run(ranks * nodes.count, [flag for flag in job if flag != DRY_RUN])
        config = resolve(job)[0].config
        check_world_size(config, ranks * nodes.count)
    except RollVerifyError as error:
        print(f"error: {error}", file=sys.stderr)
        return exit_code(error)
    return launch(job, ranks, needs_prepare=config.model.path == "", nodes=nodes)
