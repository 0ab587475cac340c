"""Table [prepare]: the permutation-chain task and the small base model trained on it.

It is used only while `model.path` or the data files are empty; it does not describe RL training.
"""

from dataclasses import dataclass
from typing import Annotated

from rollverify.config.setting import Range, Table


@dataclass(kw_only=True, slots=True, frozen=True)
class PrepareConfig(Table):
    """The task, its demonstrations, and the supervised base model."""

    seed: Annotated[int, Range(ge=0, lt=2**32)] = 0
    """Seed of the task's tables, problems, noise and of the base model's initial weights."""
    cache_dir: str = "outputs/base"
    """Folder in which prepared models are kept, one folder per content of this table."""
    num_functions: Annotated[int, Range(ge=1)] = 8
    """Number of hidden permutation tables."""
    num_states: Annotated[int, Range(ge=2)] = 24
    """Number of states a table permutes."""
    median_steps: Annotated[float, Range(gt=0)] = 8.0
    """Median of the log-normal number of times a table is applied."""
    sigma: Annotated[float, Range(ge=0)] = 0.9
    """Standard deviation of the logarithm of that number: the weight of the long tail."""
    min_steps: Annotated[int, Range(ge=1)] = 2
    """Smallest number of applications; smaller draws are raised to it."""
    max_steps: Annotated[int, Range(ge=1)] = 80
    """Largest number of applications; larger draws are lowered to it."""
    noisy_entry_frac: Annotated[float, Range(ge=0, le=1)] = 0.25
    """Share of table entries whose demonstrations are sometimes wrong."""
    noise_low: Annotated[float, Range(ge=0, le=1)] = 0.3
    """Smallest probability that a noisy entry is demonstrated wrongly."""
    noise_high: Annotated[float, Range(ge=0, le=1)] = 0.7
    """Largest probability that a noisy entry is demonstrated wrongly."""
    num_train_problems: Annotated[int, Range(ge=1)] = 4096
    """Number of training problems."""
    num_test_problems: Annotated[int, Range(ge=1)] = 256
    """Number of test problems; none of them is a training problem."""
    hidden_size: Annotated[int, Range(ge=1)] = 64
    """Width of the model's residual stream."""
    num_layers: Annotated[int, Range(ge=1)] = 2
    """Number of transformer layers."""
    num_heads: Annotated[int, Range(ge=1)] = 2
    """Number of query heads."""
    num_kv_heads: Annotated[int, Range(ge=1)] = 1
    """Number of key and value heads; divides `num_heads`."""
    head_dim: Annotated[int, Range(ge=2)] = 32
    """Size of one attention head; a multiple of 32, as the engine's CPU kernels need."""
    intermediate_size: Annotated[int, Range(ge=1)] = 192
    """Width of the feed-forward layers; with experts it is not used."""
    num_experts: Annotated[int, Range(ge=0)] = 0
    """Experts in each layer's feed-forward part; 0 makes the model dense."""
    num_experts_per_token: Annotated[int, Range(ge=1)] = 2
    """Experts that compute one token, where there are experts."""
    moe_intermediate_size: Annotated[int, Range(ge=1)] = 64
    """Inner width of one expert; a multiple of 32, as the engine's CPU kernels need."""
    tie_word_embeddings: bool = True
    """Whether the output head shares the input embedding's weights."""
    sft_steps: Annotated[int, Range(ge=1)] = 600
    """Optimizer steps of supervised training."""
    sft_batch_size: Annotated[int, Range(ge=1)] = 64
    """Demonstrations per supervised step."""
    sft_lr: Annotated[float, Range(gt=0)] = 3e-3
    """Peak learning rate of supervised training."""
