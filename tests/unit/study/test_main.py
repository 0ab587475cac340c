"""The command: plan, runs, report, exit codes."""

import pytest
from unit.study.folders import SETTINGS, own, write_run

from rollverify.config.dump import toml_value
from rollverify.study.__main__ import main
from rollverify.study.plan import plan_runs
from rollverify.study.study_file import read_study


@pytest.fixture
def place(tmp_path):
    """A study file and the folder of its runs."""
    lines = ['question = "?"', "seeds = [0, 1]", 'baseline = "on_policy"', "[settings]"]
    lines += [f"{key} = {toml_value(value)}" for key, value in SETTINGS.items()]
    for arm in ("on_policy", "rollverify"):
        lines += ["[[arms]]", f'name = "{arm}"', f'settings.method.name = "{arm}"']
    (tmp_path / "two.toml").write_text("\n".join(lines))
    return tmp_path


def run_study(place, *flags, code=0):
    """(exit code, number of runs that were started)."""
    logs = []

    def execute(command, log, watch):
        logs.append(log)
        if not code:
            runs = plan_runs(read_study(place / "two.toml"), place / "out")
            (run,) = [run for run in runs if run.place == log.parent]
            write_run(run.place / "made", own(run))
        return code

    words = [str(place / "two.toml"), "--output", str(place / "out"), "--no-plots", *flags]
    return main(words, execute), len(logs)


def test_a_study_runs_and_is_reported_and_a_second_start_only_reports(place, capsys):
    assert run_study(place) == (0, 4)
    text = (place / "out" / "two" / "report" / "report.md").read_text()
    assert text.startswith("# two\n\n?\n\n## Accuracy at equal updates")
    assert "python -m rollverify.study" in text
    assert capsys.readouterr().out.endswith("report.md\n")
    assert run_study(place) == (0, 0)


def test_a_dry_run_leaves_nothing_behind(place, capsys):
    assert run_study(place, "--dry-run") == (0, 0)
    assert not (place / "out").exists()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[0].startswith("on_policy, seed 0: not started, ")


def test_a_report_of_what_is_there_runs_nothing(place, capsys):
    assert run_study(place, "--seeds", "0", "--arms", "on_policy") == (0, 1)
    flags = ("--report-only", "--report-folder", str(place / "docs"))
    assert run_study(place, *flags) == (0, 0)
    text = (place / "docs" / "report.md").read_text()
    assert "- rollverify, seed 1: there is no run folder" in text
    assert "missing: rollverify, seed 1: there is no run folder" in capsys.readouterr().out


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (2, 1), (130, 130), (-15, 143)])
def test_exit_codes(place, code, expected):
    assert run_study(place, code=code)[0] == expected
    assert (place / "out" / "two" / "report").exists() is (expected == 1)


def test_what_the_user_can_cure_is_one_line(place, capsys):
    assert run_study(place, "--arms", "none") == (2, 0)
    assert capsys.readouterr().err == "error: study two has no arm or seed none\n"
