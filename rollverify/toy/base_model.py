"""Makes the tiny base model and its task: `python -m rollverify.toy.base_model [flags]`.

Draws the problems, writes tokenizer and prompt files, trains a small model from random weights on
noisy demonstrations through the same `PolicyTrainer` as RL, and keeps the result in a cache folder
named after the content of the [prepare] table. Runs on one process; does nothing when cached.
"""

import hashlib
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollverify.checkpoint.run_folder import resolve
from rollverify.config.environment import set_defaults
from rollverify.errors import ConfigError, RollVerifyError, exit_code
from rollverify.log import init_logger
from rollverify.toy.settings import PrepareConfig

if TYPE_CHECKING:
    from rollverify.toy.task import PermutationChain

logger = logging.getLogger(__name__)

FORMAT = 1
"""Raised when the same settings would give another base model."""

TRAIN_FILE = "train.jsonl"
TEST_FILE = "test.jsonl"
REPORT_FILE = "report.json"
MAX_POSITIONS = 512
"""Context of the base model, tokens."""

_EXPERT_KEYS = ("num_experts", "num_experts_per_token", "moe_intermediate_size")


def base_folder(prepare: PrepareConfig) -> Path:
    """Cache folder of these settings: a Hugging Face model folder with the prompt files."""
    values = {"format": FORMAT, **dict(prepare)}
    del values["cache_dir"]
    if (
        not prepare.num_experts
    ):  # So that a dense model keeps the name it had before there were any.
        for key in _EXPERT_KEYS:
            del values[key]
    digest = hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=4)
    return Path(prepare.cache_dir) / f"permutation_chain-{digest.hexdigest()}"


def is_prepared(prepare: PrepareConfig) -> bool:
    """True if the cache holds the base model of these settings; it appears there complete."""
    return (base_folder(prepare) / REPORT_FILE).is_file()


def model_config(prepare: PrepareConfig, vocab_size: int, eos_id: int, pad_id: int) -> dict:
    """Contents of config.json: Qwen3, dense or with experts, of the size asked for."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": prepare.hidden_size,
        "intermediate_size": prepare.intermediate_size,
        "num_hidden_layers": prepare.num_layers,
        "num_attention_heads": prepare.num_heads,
        "num_key_value_heads": prepare.num_kv_heads,
        "head_dim": prepare.head_dim,
        "tie_word_embeddings": prepare.tie_word_embeddings,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.08,
        "use_sliding_window": False,
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
        "dtype": "float32",
    }
    if not prepare.num_experts:
        return config
    return config | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": prepare.num_experts,
        "num_experts_per_tok": prepare.num_experts_per_token,
        "moe_intermediate_size": prepare.moe_intermediate_size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.0,
        "output_router_logits": False,
    }


def prepare_base_model(prepare: PrepareConfig) -> Path:
    """Return the cached base model's folder, making it first where it is missing.

    Args:
        prepare: the [prepare] table.

    Raises:
        ConfigError: if the task settings do not fit together or the cache cannot be written.
    """
    target = base_folder(prepare)
    if is_prepared(prepare):
        logger.info("base model: %s (cached)", target)
        return target
    from rollverify.toy.task import PermutationChain

    task = PermutationChain(
        seed=prepare.seed,
        num_functions=prepare.num_functions,
        num_states=prepare.num_states,
        median_steps=prepare.median_steps,
        sigma=prepare.sigma,
        min_steps=prepare.min_steps,
        max_steps=prepare.max_steps,
        noisy_entry_frac=prepare.noisy_entry_frac,
        noise_low=prepare.noise_low,
        noise_high=prepare.noise_high,
    )
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    start_s = time.perf_counter()
    logger.info(
        "base model: training %s for %d supervised steps (once, then cached)",
        target,
        prepare.sft_steps,
    )
    try:
        _write_task(task, prepare, partial)
        from rollverify.toy.supervised import train_base_model

        report = train_base_model(task, prepare, partial)
        report["seconds"] = round(time.perf_counter() - start_s, 1)
        (partial / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n")
        if not is_prepared(prepare):
            partial.rename(target)
    except OSError as error:
        raise ConfigError(
            f"prepare.cache_dir '{prepare.cache_dir}' cannot be written ({error.strerror}); "
            "choose another with --prepare.cache-dir"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    logger.info("base model: %s ready after %.0f s", target, report["seconds"])
    return target


def _write_task(task: "PermutationChain", prepare: PrepareConfig, folder: Path) -> None:
    from rollverify.data.prompts import write_jsonl
    from rollverify.toy.tokenizer import save_tokenizer

    folder.mkdir(parents=True)
    save_tokenizer(folder)
    write_jsonl(folder / TRAIN_FILE, task.train_problems(prepare.num_train_problems))
    write_jsonl(folder / TEST_FILE, task.test_problems(prepare.num_test_problems))


def main(argv: Sequence[str]) -> int:
    """Prepare the base model of a command line's config; return the exit code."""
    set_defaults()
    init_logger(rank=0)
    try:
        loaded, _ = resolve(argv)
        if loaded.config.model.path == "":
            prepare_base_model(loaded.config.prepare)
    except RollVerifyError as error:
        sys.stderr.write(f"error: {error}\n")
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
