"""How token losses become one number: a weight per token, from counts of the whole batch.

The batch loss is the sum of token_loss * weight, so any split into rows and ranks gives the same
gradient, provided that gradients are summed, never averaged. T tokens of one packed row.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

AggregationMode = Literal["token_mean", "sequence_mean", "constant_length"]


class BatchCounts(NamedTuple):
    """What a batch holds, over all micro-batches and, once summed, over all ranks."""

    num_tokens: int  # inside the loss mask
    num_sequences: int  # with at least one token inside the loss mask


def count_batch(loss_tokens: Tensor) -> BatchCounts:
    """This rank's share of the batch; `loss_tokens` is [B] integer, of each trajectory."""
    return BatchCounts(
        num_tokens=int(loss_tokens.sum().item()),
        num_sequences=int((loss_tokens > 0).sum().item()),
    )


@dataclass(kw_only=True, frozen=True, slots=True)
class Normalizer:
    """Weights of one optimizer step; `counts` are global.

    Answers of 1 and 3 tokens with losses [1] and [4, 4, 4]: "token_mean" weighs each token 1/4:
    3.25; "sequence_mean" 1/2, 1/6, 1/6, 1/6: 2.5; "constant_length" with length 3 each 1/6: 13/6.
    """

    mode: AggregationMode
    """Weight of a token inside the mask.

    token_mean: 1 / tokens (DAPO Section 3.3). sequence_mean: 1 / (own tokens * sequences) (GRPO).
    constant_length: 1 / (length * sequences) (Dr. GRPO).
    """

    counts: BatchCounts
    constant_length: int  # tokens; usually the longest response allowed

    def token_weights(self, loss_mask: Tensor, sequence_ids: Tensor) -> Tensor:
        """Weight of each token in the batch loss, [T] float32, 0 outside the mask, never NaN."""
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
