"""The base model's cache folder and its architecture, from the [prepare] table."""

import pytest

from rollverify.toy.settings import PrepareConfig, base_folder, model_config

DENSE = "permutation_chain-122698c2"
"""Folder of the default table, as it was before a base model could have experts."""


def test_dense_base_model_keeps_its_folder() -> None:
    assert base_folder(PrepareConfig()).name == DENSE
    assert base_folder(PrepareConfig(moe_intermediate_size=96)).name == DENSE


@pytest.mark.parametrize(
    "change", [{"num_experts": 4}, {"num_experts_per_token": 1}, {"moe_intermediate_size": 96}]
)
def test_experts_are_part_of_the_folder(change: dict[str, int]) -> None:
    values = {"num_experts": 8}
    folder = base_folder(PrepareConfig(**values))
    assert folder.name != DENSE
    assert base_folder(PrepareConfig(**(values | change))) != folder


def test_dense_config_names_no_experts() -> None:
    config = model_config(PrepareConfig(), vocab_size=80, eos_id=1, pad_id=0)
    assert config["model_type"] == "qwen3"
    assert not any("expert" in key or "moe" in key for key in config)


def test_config_with_experts_has_the_sizes_asked_for() -> None:
    prepare = PrepareConfig(num_experts=8, num_experts_per_token=3, moe_intermediate_size=96)
    config = model_config(prepare, vocab_size=80, eos_id=1, pad_id=0)
    assert (config["model_type"], config["architectures"]) == ("qwen3_moe", ["Qwen3MoeForCausalLM"])
    assert (config["num_experts"], config["num_experts_per_tok"]) == (8, 3)
    assert (config["moe_intermediate_size"], config["norm_topk_prob"]) == (96, True)
    assert config["hidden_size"] == prepare.hidden_size
