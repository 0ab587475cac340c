"""Table [prepare]: the permutation-chain task and its base model, used while no other is named."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from rollverify.config.base import Count, CountOrZero, NotNegative, Positive, Seed, Share, Table

FORMAT = 1
"""Raised when the same settings would give another base model."""

TRAIN_FILE = "train.jsonl"
TEST_FILE = "test.jsonl"
REPORT_FILE = "report.json"
_EXPERT_KEYS = ("num_experts", "num_experts_per_token", "moe_intermediate_size")

MAX_POSITIONS = 512
"""Context of the base model, tokens."""

Size = Annotated[int, Field(ge=1, lt=2**20)]


class PrepareConfig(Table, frozen=True):
    """The task, its demonstrations, and the supervised base model."""

    seed: Seed = 0
    """Seed of the task's tables, problems, noise and of the base model's initial weights."""
    cache_dir: str = "outputs/base"
    """Folder in which prepared models are kept, one folder per content of this table."""
    num_functions: Count = 8
    """Number of hidden permutation tables."""
    num_states: Annotated[int, Field(ge=2, lt=2**20)] = 24
    """Number of states a table permutes."""
    median_steps: Positive = 8.0
    """Median of the log-normal number of times a table is applied."""
    sigma: NotNegative = 0.9
    """Standard deviation of the logarithm of that number: the weight of the long tail."""
    min_steps: Count = 2
    """Smallest number of applications; smaller draws are raised to it."""
    max_steps: Count = 80
    """Largest number of applications; larger draws are lowered to it."""
    noisy_entry_frac: Share = 0.25
    """Share of table entries whose demonstrations are sometimes wrong."""
    noise_low: Share = 0.3
    """Smallest probability that a noisy entry is demonstrated wrongly."""
    noise_high: Share = 0.7
    """Largest probability that a noisy entry is demonstrated wrongly."""
    num_train_problems: Count = 4096
    """Number of training problems."""
    num_test_problems: Count = 256
    """Number of test problems; none of them is a training problem."""
    hidden_size: Size = 64
    """Width of the model's residual stream; with experts a multiple of 32."""
    num_layers: Size = 2
    """Number of transformer layers."""
    num_heads: Size = 2
    """Number of query heads."""
    num_kv_heads: Size = 1
    """Number of key and value heads; divides `num_heads`."""
    head_dim: Annotated[int, Field(ge=32, lt=2**20, multiple_of=32)] = 32
    """Size of one attention head; the engine's CPU kernels need a multiple of 32."""
    intermediate_size: Size = 192
    """Width of the feed-forward layers; with experts it is not used."""
    num_experts: CountOrZero = 0
    """Experts in each layer's feed-forward part; 0 makes the model dense."""
    num_experts_per_token: Size = 2
    """Experts that compute one token, where there are experts."""
    moe_intermediate_size: Size = 64
    """Inner width of one expert; a multiple of 32, as the engine's CPU kernels need."""
    tie_word_embeddings: bool = True
    """Whether the output head shares the input embedding's weights."""
    sft_steps: Count = 600
    """Optimizer steps of supervised training."""
    sft_batch_size: Count = 64
    """Demonstrations per supervised step."""
    sft_lr: Annotated[float, Field(gt=0, le=1)] = 3e-3
    """Peak learning rate of supervised training."""

    def broken_rules(self) -> Iterator[str]:
        """What does not go together, with its cure."""
        for low, high in (
            ("min_steps", "max_steps"),
            ("noise_low", "noise_high"),
            *([("num_experts_per_token", "num_experts")] if self.num_experts else []),
        ):
            smaller, larger = getattr(self, low), getattr(self, high)
            if smaller > larger:
                yield f"prepare.{low} must be <= prepare.{high} = {larger}, got {smaller}"
        if self.num_heads % self.num_kv_heads:
            yield (
                f"prepare.num_heads must be a multiple of prepare.num_kv_heads = "
                f"{self.num_kv_heads}, got {self.num_heads}"
            )
        for key in ("hidden_size", "moe_intermediate_size") if self.num_experts else ():
            if getattr(self, key) % 32:
                yield (
                    f"prepare.{key} must be a multiple of 32 with experts, got "
                    f"{getattr(self, key)}: the engine has no CPU kernel for others"
                )
        if not self.cache_dir.strip():
            yield f"prepare.cache_dir must name a folder, got {self.cache_dir!r}"


def base_folder(prepare: PrepareConfig) -> Path:
    """Cache folder of these settings: a Hugging Face model folder with the prompt files."""
    values = {"format": FORMAT, **dict(prepare)}
    del values["cache_dir"]
    if not prepare.num_experts:  # a dense model keeps the name it had before there were any
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
