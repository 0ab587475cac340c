"""How token losses become one number: a weight per token, from counts of the whole batch.

The batch loss is the plain sum of
token_loss * weight over every micro-batch and every rank, so any split gives the same gradient,
provided that gradients are summed over micro-batches and ranks, never averaged.

Dimensions: B trajectories, T tokens of one packed row.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

AggregationMode = Literal["token_mean", "sequence_mean", "constant_length"]


class BatchCounts(NamedTuple):
    """What a batch holds, over all micro-batches and, once summed, over all ranks."""

    num_tokens: int
    """Tokens inside the loss mask."""

    num_sequences: int
    """Trajectories with at least one token inside the loss mask: one without adds nothing to the
    loss, so it does not dilute the mean either."""


def count_batch(loss_tokens: Tensor) -> BatchCounts:
    """This rank's share of the batch; `loss_tokens` is [B] integer, of each trajectory."""
    return BatchCounts(
        num_tokens=int(loss_tokens.sum().item()),
        num_sequences=int((loss_tokens > 0).sum().item()),
    )


@dataclass(kw_only=True, frozen=True, slots=True)
class Normalizer:
    """Turns token losses into their share of the batch loss.

    Made once per optimizer step from global counts and used for each of its micro-batches.

    Example: answers of 1 and 3 tokens with losses [1] and [4, 4, 4]. "token_mean" weighs each
    token 1/4: 3.25. "sequence_mean" weighs 1/2, 1/6, 1/6, 1/6: 2.5. "constant_length" with
    length 3 weighs each 1/6: 13/6.
    """

    mode: AggregationMode
    """token_mean: 1 / tokens (DAPO Section 3.3). sequence_mean: 1 / (own tokens * sequences)
    (GRPO). constant_length: 1 / (length * sequences) (Dr. GRPO)."""

    counts: BatchCounts
    """Global counts of the optimizer step."""

    constant_length: int
    """Tokens; the divisor of constant_length, usually the longest response allowed."""

    def token_weights(self, loss_mask: Tensor, sequence_ids: Tensor) -> Tensor:
        """Weight of each token of a packed row in the batch loss, [T] float32, 0 outside the mask.

        token_loss * weight, summed over the whole batch, is the loss. A batch without any loss
        token gives weights 0, not NaN.

        Args:
            loss_mask: [T] bool.
            sequence_ids: [T] integer; equal for the tokens of one trajectory, any numbers. A
                trajectory lies in one row as a whole, because its own length is counted here.
        """
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
