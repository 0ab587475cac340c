"""Every config file loads alone and in each combination that train_configs/README.md lists."""

import re
import shlex
from pathlib import Path
from typing import get_args

import pytest

from rollverify.config.dump import diff
from rollverify.config.load import load_config, read_file
from rollverify.config.losses import Grpo, Truncated
from rollverify.config.rules import check_world_size
from rollverify.config.tables import Config, MethodConfig

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "train_configs" / "README.md").read_text(encoding="utf-8")
FILES = sorted(
    str(one.relative_to(REPOSITORY))
    for one in REPOSITORY.glob("train_configs/**/*.toml")
    if one.parent.name != "studies"  # these hold many configs; tests/unit/study loads each
)
METHODS = [file for file in FILES if file.startswith("train_configs/methods/")]
METHOD_TABLES = {"run", "method", "verification", "switching", "filter", "loss", "correction"}
CHANGES = {
    "on_policy": ['method.name: "rollverify" -> "on_policy"'],
    "partial_rollout": [
        'method.name: "rollverify" -> "partial_rollout"',
        "switching.enable: true -> false",
    ],
    "partial_rollout_ops_filter": [
        'method.name: "rollverify" -> "partial_rollout"',
        "switching.enable: true -> false",
        'filter.name: "off" -> "ops"',
    ],
    "partial_rollout_staleness_filter": [
        'method.name: "rollverify" -> "partial_rollout"',
        "switching.enable: true -> false",
        'filter.name: "off" -> "staleness"',
    ],
    "rollverify": ['verification.against: "behavior" -> "anchor"'],
    "rollverify_no_switching": ["switching.enable: true -> false"],
    "rollverify_sequence_only": ["verification.token_threshold: 2.0 -> inf"],
}
"""What each method changes in the default run, besides its name."""
RUNS = re.findall(r"^(?:NGPU=(\d+) )?\./run_train\.sh(.*)$", README, re.MULTILINE)
PRINTS = re.findall(r"^python -m rollverify\.config\.load(.*)$", README, re.MULTILINE)


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.parametrize(("ranks", "flags"), RUNS)
def test_listed_run_loads_and_fits_its_ranks(ranks: str, flags: str) -> None:
    check_world_size(load_config(shlex.split(flags)).config, int(ranks or 1))


@pytest.mark.parametrize("flags", PRINTS)
def test_listed_print_command_loads(flags: str) -> None:
    assert load_config(shlex.split(flags)).config_files


@pytest.mark.parametrize("context", [8, 16, 32, 64])
@pytest.mark.parametrize("method", ["on_policy", "partial_rollout", "rollverify"])
def test_paper_runs_have_the_numbers_of_the_paper(context: int, method: str) -> None:
    """Its section 5.1; n and top-p of the evaluation are DAPO's for AIME 24, the paper has none."""
    files = ["models/qwen3_8b_base", f"paper/dapo_math_{context}k", f"methods/{method}"]
    flags = [word for one in files for word in ("--config", f"train_configs/{one}.toml")]
    config = load_config(flags).config
    rollout, training, loss = config.rollout, config.training, config.loss
    assert rollout.max_sequence_tokens == 1024 * context
    assert (rollout.prompts_per_step, rollout.group_size, training.minibatches) == (128, 8, 1)
    assert (training.lr, training.steps) == (1e-6, 500)
    assert loss == Grpo(clip_low=0.2, clip_high=0.3)
    assert config.correction == Truncated(threshold=2.0)
    verification, switching = config.verification, config.switching
    assert (verification.segment_threshold, verification.token_threshold) == (0.01, 2.0)
    assert (switching.window, switching.threshold) == (8, 0.5)
    assert (config.data.train, config.data.test) == ("dapo_math_17k", "aime24")
    assert (config.evaluation.samples_per_problem, config.evaluation.top_p) == (32, 0.7)


@pytest.mark.parametrize("file", FILES)
def test_file_loads_alone(file: str) -> None:
    assert load_config(["--config", file]).config_files == (file,)


@pytest.mark.parametrize("file", FILES)
def test_file_is_in_the_table_and_in_a_run(file: str) -> None:
    assert f"`{file.removeprefix('train_configs/')}`" in README
    assert any(f"--config {file}" in flags for _, flags in RUNS)


def test_default_file_restates_the_defaults_of_the_schema_but_for_the_small_machine() -> None:
    """A default is changed in the schema and in default.toml together, never in one of them."""
    default = load_config(["--config", "train_configs/default.toml"]).config
    assert diff(Config(), default) == [
        'verification.against: "anchor" -> "behavior"',
        "rollout.oversampling: 2.0 -> 1.25",
        "engine.max_num_seqs: 512 -> 320",
        'training.lr_decay: "constant" -> "linear"',
    ]


@pytest.mark.parametrize("file", METHODS)
def test_method_file_changes_what_makes_the_method_and_nothing_else(file: str) -> None:
    assert set(read_file(file)) <= METHOD_TABLES
    default = "train_configs/default.toml"
    changed = load_config(["--config", default, "--config", file]).config
    name = Path(file).stem
    renamed = [f'run.name: "default" -> "{name}"']
    assert diff(load_config(["--config", default]).config, changed) == renamed + CHANGES[name]


def test_every_method_has_a_file() -> None:
    assert [Path(file).stem for file in METHODS] == list(CHANGES)
    names = {load_config(["--config", file]).config.method.name for file in METHODS}
    assert names == set(get_args(MethodConfig.model_fields["name"].annotation))
