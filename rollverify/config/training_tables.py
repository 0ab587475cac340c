"""Tables [training] and [parallelism]: the optimizer and how the ranks share its work.

What is minimised is in `loss_tables`, sampling in `rollout_tables`.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from rollverify.config.setting import Range, Table


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainingConfig(Table):
    """Optimizer, schedule, and the shape of the trainer's work."""

    steps: Annotated[int, Range(ge=1)] = 60
    """Number of training steps; one step is rollout, training, verification and sync."""
    lr: Annotated[float, Range(ge=0)] = 4.5e-4
    """Peak learning rate of AdamW. The paper's 1e-6 is for models of billions of parameters."""
    weight_decay: Annotated[float, Range(ge=0)] = 0.0
    """Decoupled weight decay."""
    beta1: Annotated[float, Range(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment."""
    beta2: Annotated[float, Range(ge=0, lt=1)] = 0.95
    """Decay of AdamW's second moment."""
    eps: Annotated[float, Range(gt=0)] = 1e-8
    """Term added to AdamW's denominator."""
    warmup_steps: Annotated[int, Range(ge=0)] = 0
    """Steps over which the learning rate rises linearly from 0."""
    lr_decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    max_grad_norm: Annotated[float, Range(gt=0)] = 1.0
    """Gradients are scaled down to this L2 norm."""
    minibatches: Annotated[int, Range(ge=1)] = 1
    """Optimizer steps per training step, each on as many whole prompts, in the order they were
    drawn. With more than 1 the ratio moves, and a scoring pass over the batch is added. Schedule
    and policy version advance once per training step."""
    micro_batch_tokens: Annotated[int, Range(ge=1)] = 8192
    """Most tokens packed into one row of a micro-batch."""
    logprob_chunk_mib: Annotated[int, Range(ge=1)] = 64
    """Memory for one chunk of logits while log-probs are computed, MiB."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of parameters and activations in forward and backward; reductions are float32."""
    activation_checkpoint: Literal["none", "selective", "full"] = "none"
    """Which activations are recomputed in backward instead of kept."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ParallelismConfig(Table):
    """How the ranks are arranged; the product of the first three is the number of ranks."""

    data_parallel_replicate: Annotated[int, Range(ge=1)] = 1
    """Copies of the sharded model (HSDP)."""
    data_parallel_shard: Annotated[int, Range(ge=1, special=-1)] = -1
    """Ranks over which parameters are sharded (FSDP2); -1 takes the ranks that are left."""
    tensor_parallel: Annotated[int, Range(ge=1)] = 1
    """Ranks over which each matrix is split."""
    expert_parallel: Annotated[int, Range(ge=1)] = 1
    """Ranks over which experts are spread; 1 for dense models."""
