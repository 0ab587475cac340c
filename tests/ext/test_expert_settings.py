"""Settings that need experts, or other experts: refused before ranks meet or an engine starts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollverify.build import build_run
from rollverify.config.load import load_config
from rollverify.errors import ConfigError, exit_code
from rollverify.toy.tokenizer import EOS_ID, save_tokenizer

ROOT = Path(__file__).resolve().parents[2]
REPLAY = ["--routing-replay.mode", "engine"]


def model_folder(root: Path, **experts: Any) -> Path:
    """A folder whose weights nobody reads here; dense without further keys."""
    folder = root / "model"
    save_tokenizer(folder)
    config = {"vocab_size": 80, "max_position_embeddings": 1024, "eos_token_id": EOS_ID}
    (folder / "config.json").write_text(json.dumps(config | experts))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (REPLAY, "routing_replay.mode = 'engine' needs a mixture-of-experts model, '.*' is dense"),
        (
            ["--routing-replay.mode", "trainer", "--verification.against", "anchor"],
            "routing_replay.mode = 'trainer' needs a mixture",
        ),
        (
            ["--parallelism.expert-parallel", "2"],
            "expert_parallel = 2 needs a mixture-of-experts model, .*; set it to 1 or another",
        ),
    ],
)
def test_a_dense_model_takes_no_setting_of_experts(
    tmp_path: Path, flags: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build_run(load_config(["--model.path", str(model_folder(tmp_path)), *flags]).config)
    assert exit_code(caught.value) == 2 and "\n" not in str(caught.value)


@pytest.mark.parametrize("degree", [3, 6, 16])
def test_the_degree_must_divide_the_experts(tmp_path: Path, degree: int) -> None:
    folder = model_folder(
        tmp_path, num_experts=8, num_experts_per_tok=2, num_hidden_layers=2, model_type="qwen3_moe"
    )
    with pytest.raises(ConfigError, match=f"expert_parallel = {degree} must divide the 8 experts"):
        flags = ["--model.path", str(folder), *REPLAY, "--parallelism.expert-parallel", str(degree)]
        build_run(load_config(flags).config)


@pytest.mark.slow
def test_replay_of_a_dense_model_ends_a_job_with_one_line_and_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rollverify.launch", "--nproc", "1", "--", *REPLAY]
    job = subprocess.run(
        [*command, "--model.path", str(model_folder(tmp_path)), "--run.output-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert job.returncode == 2
    assert job.stderr.startswith("error: routing_replay.mode = 'engine' needs a mixture")
    assert job.stderr.count("\n") == 1
