"""Runs a study and writes its report: `python -m rollverify.study train_configs/studies/NAME.toml`.

What is complete is not run again and what was interrupted goes on.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from rollverify.errors import FAILURE_EXIT_CODE, ConfigError, RollVerifyError, exit_code
from rollverify.study.plan import PlannedRun, narrowed, plan_runs
from rollverify.study.runner import Execute, LaunchedRun, plan_lines, run_all
from rollverify.study.starts import known_starts, note_start
from rollverify.study.status import status_of
from rollverify.study.study_file import Study, read_study


def main(argv: Sequence[str], execute: Execute | None = None) -> int:
    """Do what the command line asks for; return the exit code. `execute` replaces the launcher."""
    options = _parser().parse_args(argv)
    try:
        study = narrowed(read_study(options.study), options.arms, options.seeds)
        runs = plan_runs(study, options.output)
        if options.dry_run:
            for line in plan_lines(runs, study.minutes_per_run):
                _say(line)
            return 0
        if options.plots and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(
                "plots need matplotlib: pip install matplotlib (the extra 'study'), or leave them "
                "out with --no-plots"
            )
        stopped, failed = 0, list[str]()
        if not options.report_only:
            note_start(options.output / study.name, argv)
            with LaunchedRun() as launched:
                stopped, failed = run_all(runs, study.minutes_per_run, execute or launched, _say)
        if not stopped:
            _report(study, runs, options)
        return stopped or (FAILURE_EXIT_CODE if failed else 0)
    except RollVerifyError as error:
        sys.stderr.write(f"error: {error}\n")
        return exit_code(error)


def _report(study: Study, runs: Sequence[PlannedRun], options: argparse.Namespace) -> None:
    # These take pandas along, which neither the help nor a plan should wait for.
    from rollverify.study.records import read_run
    from rollverify.study.report import write_report
    from rollverify.study.results import collect

    results = collect(study, [read_run(run.arm, run.seed, status_of(run).folder) for run in runs])
    folder = options.output / study.name
    owners = dict.fromkeys([folder, *(run.place.parents[1] for run in runs)])
    starts = [start for owner in owners for start in known_starts(owner)]
    starts.sort(key=lambda start: start["date"])
    target = options.report_folder or folder / "report"
    file = write_report(results, target, starts=starts, plots=options.plots)
    for line in results.missing:
        _say(f"missing: {line}")
    _say(f"report: {file}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rollverify.study", description="Run the arms of a study and compare them."
    )
    parser.add_argument("study", type=Path, help="TOML file of train_configs/studies/")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and its time, stop")
    parser.add_argument("--report-only", action="store_true", help="report what is there, run none")
    parser.add_argument("--arms", nargs="+", default=[], help="only these arms")
    parser.add_argument("--seeds", nargs="+", type=int, default=[], help="only these seeds")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/studies"), help="folder of all studies' runs"
    )
    parser.add_argument("--report-folder", type=Path, help="default: <output>/<study>/report")
    parser.add_argument("--no-plots", dest="plots", action="store_false", help="draw nothing")
    return parser


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
