"""The dry run: published sizes of the paper's models, what it refuses, and its exit codes."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.tiny_models import tiny_config, tiny_folder, tiny_llama_folder, tiny_moe_config

from rollverify.dry_run.check import main

CONFIGS = Path(__file__).resolve().parents[2] / "train_configs"
SMALL = ["--rollout.max-prompt-tokens", "8", "--rollout.max-response-tokens", "56"]


def plan_of_paper(model: str, context: str, gpu_gib: float, *flags: str) -> int:
    files = [f"models/{model}.toml", f"paper/dapo_math_{context}.toml", "methods/rollverify.toml"]
    configs = [word for file in files for word in ("--config", str(CONFIGS / file))]
    sizes = ["--model-config", str(CONFIGS / "models" / f"{model}.json")]
    return main([*configs, *sizes, "--world-size", "32", "--gpu-gib", str(gpu_gib), *flags])


@pytest.mark.parametrize(
    ("model", "count", "gpu_gib"),
    [
        # Published: 4.0, 8.2 and 30.5 billion.
        ("qwen3_4b_base", "4,022,468,096", 80),
        ("qwen3_8b_base", "8,190,735,360", 80),
        ("qwen3_30b_a3b_base", "30,532,122,624", 80),
    ],
)
def test_paper_model_has_its_published_size_and_fits(
    model: str, count: str, gpu_gib: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_of_paper(model, "32k", gpu_gib) == 0
    out = capsys.readouterr().out
    assert f"{count} parameters, 32 ranks = 1 x 32 x 1" in out
    # 2 * 128 * 8 responses over 32 engines, or over 16 of two ranks
    num = 128 if "30b" in model else 64
    assert f"{num} responses in flight on an engine" in out


def test_phases_have_columns_and_settings_can_be_pasted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """8,190,735,360 values of 4 bytes over 32 ranks are 0.95 GiB, of 2 bytes on each 15.26."""
    assert plan_of_paper("qwen3_8b_base", "32k", 80) == 0
    out = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "GiB of 80.0 rollout training optimizer step weight sync" in rows
    assert "weights 0.95 0.95 0.95 0.95" in rows
    assert "engine weights 15.26 0.00 0.00 15.26" in rows
    assert "estimates, not measured" in out
    config = tomllib.loads(out[out.index("[engine]") :])
    assert config == {"engine": {"max_num_seqs": 23, "gpu_memory_utilization": 0.86}}
    flags = [f"--engine.{key}={value}" for key, value in config["engine"].items()]
    assert "warning" in out
    assert plan_of_paper("qwen3_8b_base", "32k", 80, *flags) == 0
    assert "warning" not in capsys.readouterr().out


def test_the_reference_of_a_kl_term_waits_in_main_memory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--kl.coefficient", "0.01"]
    assert plan_of_paper("qwen3_8b_base", "8k", 80, *flags) == 0
    assert "reference" not in capsys.readouterr().out
    folder = tiny_folder(tmp_path / "model", vocab_size=300_000)
    assert dry_run(folder, *flags) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    rows = dict(line.strip().rsplit(maxsplit=1) for line in lines)
    # Its own weights and, while it lends its model, the policy's.
    assert float(rows["reference"]) == pytest.approx(2 * float(rows["weights"]), abs=0.01)
    assert float(rows["reference"]) > 0


def test_weights_that_fill_the_engine_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """30.5 billion values of 2 bytes are 56.9 GiB; 0.6 of 80 are 48."""
    share = ["--engine.gpu-memory-utilization", "0.6", "--engine.tensor-parallel", "1"]
    assert plan_of_paper("qwen3_30b_a3b_base", "32k", 80, *share) == 2
    error = capsys.readouterr().err
    assert "of weights and workspace there are 0.0 GiB of cache, but one response of" in error
    assert "use a larger engine.gpu_memory_utilization" in error
    assert "engine.tensor_parallel = 2" in error


def test_a_cure_that_is_taken_is_not_named_again(capsys: pytest.CaptureFixture[str]) -> None:
    """The presets of the paper recompute all activations already."""
    assert plan_of_paper("qwen3_8b_base", "32k", 30) == 2
    error = capsys.readouterr().err
    assert "more ranks" in error and "activation_checkpoint" not in error
    none = ["--training.activation-checkpoint", "none"]
    assert plan_of_paper("qwen3_8b_base", "32k", 30, *none) == 2
    assert "activation_checkpoint = 'full'" in capsys.readouterr().err


REFUSED = [
    (["--parallelism.tensor-parallel", "16"], "does not divide the model's 8 key-value heads"),
    (["--parallelism.expert-parallel", "2"], "expert parallel 2: the model is dense"),
    (["--engine.tensor-parallel", "3"], "engine.tensor_parallel = 3 must divide the 32 ranks"),
    (["--parallelism.tensor-parallel", "3"], "but 32 ranks started"),
    (["--rollout.prompts-per-step", "100"], "prompts_per_step must be a multiple of the 32"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_degrees_that_divide_nothing_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_of_paper("qwen3_8b_base", "32k", 80, *flags) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_experts_that_do_not_divide_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """96 prompts divide by 24 ranks, 128 experts do not."""
    flags = ["--world-size", "24", "--rollout.prompts-per-step", "96"]
    assert plan_of_paper("qwen3_30b_a3b_base", "32k", 141, *flags) == 2
    assert "128 experts cannot be divided evenly over 24 ranks" in capsys.readouterr().err


def test_context_of_64k_needs_a_model_that_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan is printed all the same: the memory does not depend on the published context."""
    assert plan_of_paper("qwen3_8b_base", "64k", 80) == 2
    said = capsys.readouterr()
    assert "65536 exceeds the model's context of 32768" in said.err and said.err.count("\n") == 1
    assert "up to 65,536 tokens" in said.out and "in all" in said.out


@pytest.mark.parametrize(
    ("gib", "flags", "said"),
    [
        (80, [], "one step on 32 x H100, computed, not measured"),
        (80, ["--gpu", "A100"], "one step on 32 x A100, computed, not measured"),
        (110, [], "no timeline: no GPU is known by its 110 GiB; name one with --gpu"),
        (110, ["--gpu", "H100"], "one step on 32 x H100, computed, not measured"),
        (80, ["--training.dtype", "float32"], "no timeline: it is for bfloat16, in training.dtype"),
        (80, ["--median-response-tokens", "1000"], "responses of 992 tokens in the median"),
        (80, ["--acceptance", "0.75"], "of the tokens verified 75% are kept"),
    ],
)
def test_the_timeline_of_a_step_says_what_it_rests_on(
    gib: float, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_of_paper("qwen3_8b_base", "32k", gib, *flags)
    assert said in capsys.readouterr().out


def test_a_gpu_by_name_brings_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    config = CONFIGS / "models" / "qwen3_8b_base"
    files = ["--config", f"{config}.toml", "--model-config", f"{config}.json"]
    sizes = ["--world-size", "32", "--training.micro-batch-tokens", "8192"]
    assert main([*files, *sizes, "--gpu", "h200"]) == 0
    assert "GiB of 139.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpu-gib", "nan"], "--gpu-gib must be a finite number above 0"),
        (["--gpu-gib", "inf"], "--gpu-gib must be a finite number above 0"),
        (["--world-size", "0"], "--world-size must be above 0"),
        (["--gpu", "T4"], "--gpu: no figures of 'T4'; choose one of A100"),
        (["--acceptance", "1.1"], "--acceptance must be between 0 and 1"),
        (["--median-response-tokens", "0"], "--median-response-tokens must be a finite number"),
        (["--world-size", "x"], "argument --world-size: invalid int value: 'x'"),
        (["--model-config"], "argument --model-config: expected one argument"),
    ],
)
def test_a_wrong_flag_is_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_of_paper("qwen3_8b_base", "32k", 80, *flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_a_bad_model_config_is_named_as_it_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sizes.json").write_text('{"model_type": "gpt2"}')
    assert main(["--model-config", str(tmp_path / "sizes.json")]) == 2
    error = capsys.readouterr().err
    assert f"--model-config: '{tmp_path / 'sizes.json'}': model_type 'gpt2'" in error
    (tmp_path / "sizes.json").write_text("{")
    assert main(["--model-config", str(tmp_path / "sizes.json")]) == 2
    assert f"{tmp_path / 'sizes.json'}: not valid JSON" in capsys.readouterr().err


def dry_run(folder: Path, *flags: str) -> int:
    return main(["--model.path", str(folder), *SMALL, *flags])


@pytest.mark.parametrize("make", [tiny_folder, tiny_llama_folder])
def test_folder_with_its_own_weights_passes(make: Any, tmp_path: Path) -> None:
    assert dry_run(make(tmp_path / "model")) == 0


def test_folder_without_weights_says_what_was_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_moe_config()))
    assert dry_run(tmp_path) == 0
    assert "no weights to compare names and shapes with" in capsys.readouterr().out


def test_weights_of_another_shape_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_folder(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(tiny_config(intermediate_size=96)))
    assert dry_run(folder) == 2
    error = capsys.readouterr().err
    # Three matrices in each of two layers.
    assert "mlp.down_proj.weight has shape [48, 80], config.json means [48, 96]" in error
    assert "(and 5 more)" in error


def test_missing_weight_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_folder(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors")
    assert dry_run(folder) == 2
    assert "model.norm.weight is missing; its weights" in capsys.readouterr().err


def test_file_that_holds_no_weights_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_folder(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"<html>")
    assert dry_run(folder) == 2
    assert "model.safetensors is not a safetensors file" in capsys.readouterr().err
