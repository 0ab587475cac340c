"""A miniature study with the real engine and trainer: two arms, one seed, through to the report."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from integration.jobs import ROOT, SETTINGS, START_LIMIT_S

from rollverify.config.dump import toml_value

pytestmark = pytest.mark.vllm

STEPS = 3
OWN = {"training.steps": STEPS, "checkpoint.every_steps": 1, "verification.segment_threshold": 0.01}
CLAIM = """
[[claims]]
text = "Fewer decode steps"
kind = "fewer_decode_steps"
arm = "rollverify"
other = "on_policy"
factor = 1.0
"""


def write_study(folder: Path) -> None:
    lines = ['question = "Which?"', "seeds = [0]", 'baseline = "on_policy"']
    settings = {**SETTINGS, **OWN, "prepare.cache_dir": str(folder / "base")}
    for arm in ("on_policy", "rollverify"):
        file = f'"train_configs/methods/{arm}.toml"'
        lines += ["[[arms]]", f'name = "{arm}"', f"config_files = [{file}]"]
        lines += [f"settings.{key} = {toml_value(value)}" for key, value in settings.items()]
    (folder / "tiny.toml").write_text("\n".join(lines) + CLAIM)


def start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rollverify.study", str(folder / "tiny.toml")]
    return subprocess.Popen(
        [*command, "--output", str(folder / "runs"), *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=2 * START_LIMIT_S)
    assert process.returncode == code, output[-4000:]
    return output


def wait_for(place: Path, name: str) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not list(place.glob(name)):
        assert time.monotonic() < deadline, f"no {name} below {place}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that was interrupted in its second run, and went on."""
    made = tmp_path_factory.mktemp("study")
    write_study(made)
    process = start(made)
    wait_for(made / "runs" / "tiny" / "rollverify", "seed-0/*/checkpoints/step-1/.metadata")
    process.send_signal(signal.SIGTERM)
    finish(process, 128 + signal.SIGTERM)
    finish(start(made))
    return made


def test_an_interrupted_study_goes_on_in_the_same_folders(folder):
    for arm in ("on_policy", "rollverify"):
        (run,) = [
            one for one in (folder / "runs" / "tiny" / arm / "seed-0").iterdir() if one.is_dir()
        ]
        steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()]
        assert steps == list(range(STEPS + 1))


def test_the_report_has_every_table_and_plots(folder):
    report = folder / "runs" / "tiny" / "report"
    text = (report / "report.md").read_text()
    for title in ("Expected and found", "Accuracy at equal updates", "Accuracy at equal cost"):
        assert f"## {title}" in text
    assert "not decided" not in text and "## Missing data" not in text
    names = {file.name for file in report.iterdir()}
    assert {"runs.csv", "tables.csv", "report.json", "curves.png", "cost_model.png"} <= names


def test_figures_come_from_the_runs(folder):
    values = json.loads((folder / "runs" / "tiny" / "report" / "report.json").read_text())
    arms = {name: arm["figures"] for name, arm in values["arms"].items()}
    assert arms["on_policy"]["acceptance"] == [None]
    assert 0 < arms["rollverify"]["acceptance"][0] <= 1
    # float32 on both sides: what was sampled under a policy is trained on under the same one.
    assert arms["on_policy"]["ops_mean"][0] == pytest.approx(0, abs=1e-5)
    assert len(values["starts"]) == 2


def test_a_complete_study_starts_nothing(folder):
    output = finish(start(folder, "--no-plots"))
    assert output.count("complete already") == 2 and "starting" not in output
