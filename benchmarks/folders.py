"""The two model folders of the benchmarks: the prepared base model and one that never stops.

Each holds Hugging Face weights, tokenizer and `train.jsonl`.
"""

import sys
from pathlib import Path
from typing import Any

from benchmarks.isolated import child_environment, run_quietly
from rollverify.toy.settings import TRAIN_FILE, PrepareConfig, base_folder, is_prepared

ENDLESS_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 80,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_sliding_window": False,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "dtype": "float32",
}
"""0.8M parameters over the project's character vocabulary."""

STOP_WEIGHT = -10.0
"""Head weight of the stop token on the constant channel, which is about 7 after the final norm;
the stop token then has a probability near exp(-70)."""


def prepared_base(folder: Path | None) -> Path:
    """The given base folder, or the default one, made first where it is missing (minutes)."""
    if folder is not None:
        return folder
    settings = PrepareConfig()
    if not is_prepared(settings):
        run_quietly([sys.executable, "-m", "rollverify.toy.base_model"], child_environment())
    return base_folder(settings)


def write_endless_folder(
    folder: Path, num_prompts: int, config: dict[str, Any] = ENDLESS_CONFIG
) -> Path:
    """Write a random model whose stop token is never drawn, so all responses have full length.

    Channel 0 of the residual stream is 1 at every position: each embedding has it and no layer
    writes to it. The head reads it as a bias, 0 for every token but the stop token. To any engine
    this is an ordinary Qwen3.

    Args:
        folder: target; must not exist.
        num_prompts: lines of `train.jsonl`.
        config: contents of config.json; the head must not be tied to the embedding.

    Returns:
        The folder.
    """
    from safetensors.torch import load_file, save_file

    from rollverify.data.prompts import write_jsonl
    from rollverify.toy.task import PermutationChain
    from rollverify.toy.tokenizer import save_tokenizer
    from torchtitan_ext.hf_folder import write_random_hf_folder

    write_random_hf_folder(folder, config, seed=0)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0.0
    weights["model.embed_tokens.weight"][:, 0] = 1.0
    weights["lm_head.weight"][:, 0] = 0.0
    weights["lm_head.weight"][config["eos_token_id"], 0] = STOP_WEIGHT
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder)
    write_jsonl(folder / TRAIN_FILE, PermutationChain().train_problems(num_prompts))
    return folder


def num_parameters(folder: Path) -> int:
    """Parameters stored in the folder's weight files."""
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a dict)
                size = 1
                for extent in weights.get_slice(name).get_shape():
                    size *= extent
                total += size
    return total
