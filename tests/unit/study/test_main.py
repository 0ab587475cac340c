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


def run_study(place, *flags, code=0, commands=None):
    study = read_study(place / "two.toml")

    def execute(command, log, watch):
        if commands is not None:
            commands.append(command)
        if code:
            return code
        runs = plan_runs(study, place / "out")
        (run,) = [one for one in runs if one.place == log.parent]
        write_run(run.place / "made", own(run))
        return 0

    words = [str(place / "two.toml"), "--output", str(place / "out"), "--no-plots", *flags]
    return main(words, execute)


def test_a_study_runs_and_is_reported(place, capsys):
    commands = []
    assert run_study(place, commands=commands) == 0
    assert len(commands) == 4
    text = (place / "out" / "two" / "report" / "report.md").read_text()
    assert text.startswith("# two\n\n?\n\n## Accuracy at equal updates")
    assert "python -m rollverify.study" in text
    assert capsys.readouterr().out.endswith("report.md\n")


def test_a_second_start_only_reports(place):
    run_study(place)
    commands = []
    assert run_study(place, commands=commands) == 0
    assert commands == []


def test_a_dry_run_leaves_nothing_behind(place, capsys):
    assert run_study(place, "--dry-run") == 0
    assert not (place / "out").exists()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[0].startswith("on_policy, seed 0: not started, ")


def test_a_report_of_what_is_there_runs_nothing(place, capsys):
    run_study(place, "--seeds", "0")
    commands = []
    target = place / "docs"
    flags = ("--report-only", "--report-folder", str(target))
    assert run_study(place, *flags, commands=commands) == 0
    assert commands == []
    assert "- rollverify, seed 1: there is no run folder" in (target / "report.md").read_text()
    assert "missing: rollverify, seed 1: there is no run folder" in capsys.readouterr().out


def test_arms_can_be_chosen(place):
    commands = []
    assert run_study(place, "--arms", "rollverify", "--seeds", "1", commands=commands) == 0
    assert len(commands) == 1


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (2, 1), (130, 130), (-15, 143)])
def test_exit_codes(place, code, expected):
    assert run_study(place, code=code) == expected
    assert (place / "out" / "two" / "report").exists() is (expected == 1)


def test_what_the_user_can_cure_is_one_line(place, capsys):
    assert run_study(place, "--arms", "none") == 2
    assert capsys.readouterr().err == "error: study two has no arm or seed none\n"
