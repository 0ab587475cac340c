"""How token losses become one number: a weight per token, from counts of the whole batch.

Does not compute losses and does not choose micro-batches. The batch loss is the plain sum of
token_loss * weight over every micro-batch and every rank, so any split gives the same gradient,
provided that gradients are summed over micro-batches and ranks, never averaged.

Dimensions: B trajectories, T tokens of one packed row.
"""

from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

AggregationMode = Literal["token_mean", "sequence_mean", "constant_length"]


@dataclass(kw_only=True, frozen=True, slots=True)
class BatchCounts:
    """What a batch holds, over all micro-batches and, once reduced, over all ranks."""

    num_tokens: int
    """Tokens inside the loss mask."""

    num_sequences: int
    """Trajectories with at least one token inside the loss mask."""


def count_batch(loss_tokens: Tensor) -> BatchCounts:
    """Count this rank's share of the batch.

    A trajectory without a single loss token does not count: it can add nothing to the loss, so
    it must not dilute the mean either. Synchronizes with the device.

    Args:
        loss_tokens: [B] integer; tokens inside the loss mask of each trajectory, >= 0.

    Returns:
        The rank's own counts; `reduce_counts` makes them global.

    Raises:
        ValueError: if loss_tokens is not one-dimensional.

    Source:
        Our choice where the papers are silent, as in common practice: fully masked sequences
        leave the denominator.
    """
    if loss_tokens.ndim != 1:
        raise ValueError(f"loss_tokens must have shape [B], got {list(loss_tokens.shape)}")
    return BatchCounts(
        num_tokens=int(loss_tokens.sum().item()),
        num_sequences=int((loss_tokens > 0).sum().item()),
    )


def reduce_counts(
    counts: BatchCounts, group: dist.ProcessGroup | None = None, device: str = "cpu"
) -> BatchCounts:
    """Add the counts of all ranks that hold different trajectories.

    Collective: yes, over `group`. Without a process group the counts are returned as they are.

    Args:
        counts: this rank's own counts.
        group: the data-parallel ranks; None means all ranks. Ranks that share their trajectories
            (tensor parallelism) must not both be in it.
        device: where the two integers are reduced; an nccl group needs "cuda".

    Returns:
        The same counts on every rank of the group.

    Raises:
        RuntimeError: from the collective, if the ranks do not all call it.

    Source:
        Our choice; a mean of per-rank means is the fault it avoids.
    """
    if not dist.is_initialized():
        return counts
    pair = torch.tensor([counts.num_tokens, counts.num_sequences], dtype=torch.int64, device=device)
    # torch declares no types for all_reduce.
    dist.all_reduce(pair, op=dist.ReduceOp.SUM, group=group)  # pyright: ignore[reportUnknownMemberType]
    return BatchCounts(num_tokens=int(pair[0].item()), num_sequences=int(pair[1].item()))


@dataclass(kw_only=True, frozen=True, slots=True)
class Normalizer:
    """Turns token losses into their share of the batch loss.

    Made once per optimizer step from global counts and used for each of its micro-batches.

    Example: answers of 1 and 3 tokens with losses [1] and [4, 4, 4]. "token_mean" weighs each
    token 1/4: 3.25. "sequence_mean" weighs 1/2, 1/6, 1/6, 1/6: 2.5. "constant_length" with
    length 3 weighs each 1/6: 13/6.
    """

    mode: AggregationMode
    """token_mean: 1 / tokens (DAPO). sequence_mean: 1 / (own tokens * sequences) (GRPO).
    constant_length: 1 / (length * sequences) (Dr. GRPO)."""

    counts: BatchCounts
    """Global counts of the optimizer step."""

    constant_length: int
    """Tokens; the divisor of constant_length, usually the longest response allowed. > 0."""

    def __post_init__(self) -> None:
        """Refuse an unknown mode or a length that is not positive."""
        if self.mode not in ("token_mean", "sequence_mean", "constant_length"):
            raise ValueError(
                "mode must be 'token_mean', 'sequence_mean' or 'constant_length', "
                f"got {self.mode!r}"
            )
        if self.constant_length <= 0:
            raise ValueError(f"constant_length must be > 0, got {self.constant_length}")

    def token_weights(self, loss_mask: Tensor, sequence_ids: Tensor) -> Tensor:
        """Weight of each token of a packed row in the batch loss.

        A batch without any loss token gives weights 0, not NaN.

        Args:
            loss_mask: [T] bool; True on tokens the loss sums over.
            sequence_ids: [T] integer; equal for the tokens of one trajectory, any numbers;
                values outside the mask are ignored. A trajectory must lie in one row as a
                whole, because its own length is counted here.

        Returns:
            [T] float32, dimensionless; 0 outside the mask. token_loss * weight, summed over the
            whole batch, is the loss.

        Raises:
            ValueError: if shapes or dtypes do not fit.

        Source:
            token_mean: DAPO Section 3.3. sequence_mean: GRPO. constant_length: Dr. GRPO.
        """
        if loss_mask.ndim != 1 or loss_mask.dtype != torch.bool:
            raise ValueError(
                f"loss_mask must be [T] bool, got {list(loss_mask.shape)} {loss_mask.dtype}"
            )
        if sequence_ids.shape != loss_mask.shape or sequence_ids.is_floating_point():
            raise ValueError(
                f"sequence_ids must be [T] integers like loss_mask {list(loss_mask.shape)}, "
                f"got {list(sequence_ids.shape)} {sequence_ids.dtype}"
            )
        inside_T = loss_mask.to(torch.float32)
        if self.mode == "token_mean":
            return inside_T / max(self.counts.num_tokens, 1)
        num_sequences = max(self.counts.num_sequences, 1)
        if self.mode == "constant_length":
            return inside_T / (self.constant_length * num_sequences)
        return inside_T / (_own_lengths(loss_mask, sequence_ids) * num_sequences)


def _own_lengths(loss_mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """[T] float32; loss tokens of each token's own trajectory, at least 1."""
    # torch declares no types for unique. Masked tokens add 0 to whatever length they fall under.
    _, index_T = cast(
        "tuple[Tensor, Tensor]",
        torch.unique(sequence_ids, return_inverse=True),  # pyright: ignore[reportUnknownMemberType]
    )
    inside_T = loss_mask.to(torch.float32)
    lengths_T = torch.zeros_like(inside_T).index_add(0, index_T, inside_T)
    return lengths_T[index_T].clamp(min=1.0)
