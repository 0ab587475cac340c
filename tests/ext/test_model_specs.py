"""Model specs from config.json: what is built, and the one-line errors of bad folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_config, tiny_llama_config, tiny_moe_config
from torchtitan.distributed import ParallelDims

from torchtitan_ext.models.hf_config import ModelFolderError, read_hf_config
from torchtitan_ext.models.specs import check_expert_shards, model_spec_from_hf


def folder_with(tmp_path: Path, text: str) -> Path:
    (tmp_path / "config.json").write_text(text)
    return tmp_path


def without(key: str, config: dict[str, Any] | None = None) -> dict[str, Any]:
    return {name: value for name, value in (config or tiny_config()).items() if name != key}


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
BAD_CONFIGS = [
    (without("hidden_size"), "lacks hidden_size"),
    (without("head_dim"), "lacks head_dim"),
    (
        without("model_type"),
        "model_type None is not supported; supported: llama, qwen3, qwen3_moe",
    ),
    (without("rope_parameters"), "lacks rope_theta"),
    (tiny_config(model_type="gemma"), "model_type 'gemma' is not supported"),
    (
        tiny_config(hidden_size="48"),
        "hidden_size must be a whole number from 1 to 524288, got '48'",
    ),
    (tiny_config(rms_norm_eps=None), "rms_norm_eps must be a finite number above 0, got None"),
    (tiny_config(num_key_value_heads=3), "4 is not a multiple of num_key_value_heads 3"),
    (tiny_config(attention_bias=True), "attention biases"),
    (tiny_config(use_sliding_window=True), "sliding windows"),
    (tiny_config(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    (tiny_config(rope_parameters=YARN), "rope type 'yarn' is not supported"),
    (tiny_config(rope_parameters=LLAMA3), "rope type 'llama3' is not supported, only 'default'"),
    (
        tiny_llama_config(rope_parameters=YARN),
        "not supported, only 'default' and 'llama3'",
    ),
    (tiny_llama_config(rope_parameters=without("factor", LLAMA3)), "lacks factor"),
    (tiny_llama_config(rope_parameters=without("rope_theta", LLAMA3)), "lacks rope_theta"),
    (tiny_llama_config(mlp_bias=True), "biases of the feed-forward layers"),
    (without("hidden_size", tiny_llama_config(head_dim=None)), "lacks hidden_size"),
    (tiny_config(quantization_config={"quant_method": "fp8"}), "quantized weights"),
    (without("num_experts", tiny_moe_config()), "lacks num_experts"),
    (without("num_experts_per_tok", tiny_moe_config()), "lacks num_experts_per_tok"),
    (without("moe_intermediate_size", tiny_moe_config()), "lacks moe_intermediate_size"),
    (without("head_dim", tiny_moe_config()), "lacks head_dim"),
    (tiny_moe_config(num_experts=0), "num_experts must be a whole number from 1 to 10000, got 0"),
    (tiny_moe_config(num_local_experts=4), "num_experts 8 and num_local_experts 4 differ"),
    (tiny_moe_config(num_experts_per_tok=9), "num_experts_per_tok 9 exceeds num_experts 8"),
    (tiny_moe_config(moe_intermediate_size=2.5), "moe_intermediate_size must be a whole number"),
    (tiny_moe_config(norm_topk_prob=1), "norm_topk_prob must be true or false, got 1"),
    (tiny_moe_config(shared_expert_intermediate_size=64), "shared experts are not supported"),
    (tiny_moe_config(decoder_sparse_step=0), "decoder_sparse_step must be a whole number"),
    (tiny_moe_config(decoder_sparse_step=3), "leave no layer with experts"),
    (tiny_moe_config(mlp_only_layers=[2]), "mlp_only_layers names layer 2, but there are 2"),
    (tiny_moe_config(mlp_only_layers=1), "mlp_only_layers must be a list of layers, got 1"),
]


@pytest.mark.parametrize(
    ("config", "message"), BAD_CONFIGS, ids=lambda v: v if type(v) is str else ""
)
def test_bad_config_gives_one_line_that_names_the_folder(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelFolderError) as caught:
        model_spec_from_hf(folder_with(tmp_path, json.dumps(config)))
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not valid JSON"), ("[1]", "must hold a JSON object, got list"), ("", "not valid JSON")],
)
def test_broken_file_gives_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ModelFolderError, match=message) as caught:
        read_hf_config(folder_with(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_missing_folder_and_missing_file_differ(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="does not exist"):
        read_hf_config(tmp_path / "nowhere")
    with pytest.raises(ModelFolderError, match=r"has no config\.json"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_spec_has_the_sizes_of_the_config(tmp_path: Path, tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied)
    spec = model_spec_from_hf(folder_with(tmp_path, json.dumps(config)))
    with torch.device("meta"):
        model = spec.model.build()
    # embedding 101*48; layer: q and o 2*48*128, k and v 2*48*64, mlp 3*48*80, norms 2*48+2*32
    layer = 2 * 48 * 128 + 2 * 48 * 64 + 3 * 48 * 80 + 2 * 48 + 2 * 32
    heads = 1 if tied else 2
    assert sum(p.numel() for p in model.parameters()) == heads * 101 * 48 + 2 * layer + 48


def test_llama_may_leave_out_key_heads_and_head_size(tmp_path: Path) -> None:
    """As transformers fills them in: as many key heads as query heads, each 48 / 3 wide."""
    config = without("num_key_value_heads", without("head_dim", tiny_llama_config()))
    spec = model_spec_from_hf(folder_with(tmp_path, json.dumps(config)))
    attention = spec.model.layers[0].attention
    assert (attention.n_kv_heads, attention.head_dim) == (3, 16)


def test_old_spelling_of_rope_theta_is_read(tmp_path: Path) -> None:
    config = without("rope_parameters") | {"rope_theta": 5e5}
    spec = model_spec_from_hf(folder_with(tmp_path, json.dumps(config)))
    assert spec.model.layers[0].attention.rope.theta == 5e5


def built_on_meta(folder: Path) -> tuple[Any, torch.nn.Module]:
    spec = model_spec_from_hf(folder)
    with torch.device("meta"):
        return spec, spec.model.build()


def test_moe_spec_has_the_sizes_of_the_config(tmp_path: Path) -> None:
    _, model = built_on_meta(folder_with(tmp_path, json.dumps(tiny_moe_config())))
    # attention and norms as above; gate 8*48, experts 8*3*48*32
    layer = 2 * 48 * 128 + 2 * 48 * 64 + 2 * 48 + 2 * 32 + 8 * 48 + 8 * 3 * 48 * 32
    assert sum(p.numel() for p in model.parameters()) == 101 * 48 + 2 * layer + 48


def test_spelling_of_transformers_5_is_read(tmp_path: Path) -> None:
    config = without("num_experts", tiny_moe_config()) | {"num_local_experts": 16}
    spec = model_spec_from_hf(folder_with(tmp_path, json.dumps(config)))
    assert spec.model.layers[1].moe.num_experts == 16


@pytest.mark.parametrize(
    ("changes", "with_experts"),
    [
        # (i + 1) % 2 == 0 for i = 1, 3
        ({"decoder_sparse_step": 2}, [1, 3]),
        ({"mlp_only_layers": [0, 2]}, [1, 3]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1]),
        ({"mlp_only_layers": None}, [0, 1, 2, 3]),
    ],
)
def test_dense_layers_lie_where_transformers_puts_them(
    tmp_path: Path, changes: dict[str, Any], with_experts: list[int]
) -> None:
    config = tiny_moe_config(num_hidden_layers=4, **changes)
    layers = model_spec_from_hf(folder_with(tmp_path, json.dumps(config))).model.layers
    assert [i for i, layer in enumerate(layers) if layer.moe is not None] == with_experts
    assert all((layer.moe is None) != (layer.feed_forward is None) for layer in layers)


# Public numbers of Qwen/Qwen3-30B-A3B.
QWEN3_30B_A3B = tiny_moe_config(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    max_position_embeddings=40960,
    rope_parameters=None,
    rope_scaling=None,
    rope_theta=1000000.0,
    initializer_range=0.02,
    tie_word_embeddings=False,
    output_router_logits=False,
    router_aux_loss_coef=0.001,
    sliding_window=None,
    dtype="bfloat16",
)


def test_30b_has_the_published_parameter_count_and_names(tmp_path: Path) -> None:
    spec, model = built_on_meta(folder_with(tmp_path, json.dumps(QWEN3_30B_A3B)))
    # layer: q, o 2*2048*4096; k, v 2*2048*512; norms 2*2048+2*128; gate 128*2048; 128*3*2048*768
    # = 623,120,640; 48 layers, embedding and head 2*151936*2048, last norm 2048: 30.5 billion
    assert sum(p.numel() for p in model.parameters()) == 30_532_122_624
    names = set(spec.state_dict_adapter(spec.model, None).to_hf(model.state_dict()))
    attention = [f"self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj")]
    attention += ["self_attn.q_norm", "self_attn.k_norm"]
    experts = [f"mlp.experts.{e}.{n}_proj" for e in range(128) for n in ("gate", "up", "down")]
    parts = [*attention, *experts, "mlp.gate", "input_layernorm", "post_attention_layernorm"]
    want = {f"model.layers.{i}.{part}.weight" for i in range(48) for part in parts}
    assert names == want | {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


def parallel_dims(**degrees: int) -> ParallelDims:
    values = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1} | degrees
    world = values["dp_replicate"] * values["dp_shard"] * values["tp"]
    return ParallelDims(**values, world_size=world, spmd_backend="partial_dtensor")


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"dp_shard": 3}, "8 experts cannot be divided evenly over 3 ranks"),
        ({"dp_shard": 3, "ep": 3}, "over 3 ranks with expert parallel 3"),
        ({"dp_shard": 6, "ep": 2}, "over 6 ranks with expert parallel 2"),
        # 8 experts over 32 ranks: four ranks share one, and 30 is no multiple of 4.
        ({"dp_shard": 32, "ep": 8}, "one expert, 30 x 48, cannot be divided evenly over 4 ranks"),
    ],
)
def test_degrees_that_do_not_divide_the_experts_are_refused(
    tmp_path: Path, degrees: dict[str, int], message: str
) -> None:
    config = tiny_moe_config(moe_intermediate_size=30)
    _, model = built_on_meta(folder_with(tmp_path, json.dumps(config)))
    with pytest.raises(ModelFolderError, match=message) as caught:
        check_expert_shards(model, parallel_dims(**degrees))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "degrees",
    [{}, {"dp_shard": 8}, {"dp_shard": 4, "ep": 2}, {"dp_shard": 16, "ep": 8}, {"tp": 3}],
)
def test_degrees_that_divide_the_experts_pass(tmp_path: Path, degrees: dict[str, int]) -> None:
    config = tiny_moe_config(moe_intermediate_size=30)
    check_expert_shards(
        built_on_meta(folder_with(tmp_path, json.dumps(config)))[1], parallel_dims(**degrees)
    )


def test_expert_parallel_of_a_dense_model_is_refused(tmp_path: Path) -> None:
    _, model = built_on_meta(folder_with(tmp_path, json.dumps(tiny_config())))
    with pytest.raises(ModelFolderError, match="expert parallel 2: the model is dense"):
        check_expert_shards(model, parallel_dims(dp_shard=2, ep=2))
