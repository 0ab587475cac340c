"""A run that is started from Python, as the README shows."""

import subprocess
import sys
from pathlib import Path

import pytest
from integration.jobs import ROOT, SETTINGS, START_LIMIT_S

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROGRAM = """
import sys
from rollverify.build import build_run
from rollverify.config.load import load_config
from rollverify.toy.base_model import prepare_base_model
from rollverify.train import train_to_end

config = load_config(sys.argv[1:]).config
prepare_base_model(config.prepare)
with build_run(config) as run:
    run.start()
    assert train_to_end(run) == 0
    print("folder:", run.folder)
"""


def test_a_run_starts_from_python(tmp_path: Path) -> None:
    values = {**SETTINGS, "prepare.cache_dir": tmp_path / "base", "run.output_dir": tmp_path}
    words = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S * 2,
    )
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.splitlines()[-1].removeprefix("folder: "))
    assert (
        len((folder / "metrics.jsonl").read_text().splitlines()) == SETTINGS["training.steps"] + 1
    )
