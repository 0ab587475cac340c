"""Table [prepare]: the permutation-chain task and its base model, used while nothing else is named.

Imports nothing but the config's base, so that a misspelt key is reported before torch is loaded.
"""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from rollverify.config.base import Count, CountOrZero, NotNegative, Positive, Seed, Share, Table

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
