"""Lengths of responses that a timeline assumes: log-normal, cut at the limit.

A prompt has a length of its own and its responses vary around it. What a step does depends on
means over such groups only, so they are taken over a fixed sample.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_GROUPS = 20_000
PROMPT_SPREAD = 0.6
"""Standard deviation, over prompts, of the log of their median length."""
RESPONSE_SPREAD = 0.5
"""Standard deviation of log length among the responses to a prompt."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Response tokens [groups, group_size], float64."""

    groups: Tensor

    @property
    def limit_frac(self) -> float:
        """Share of responses that are as long as the longest: with many, those at the limit."""
        return float((self.groups == self.groups.max()).double().mean())

    def moment(self, power: int) -> float:
        """Mean of a power of the length."""
        return float((self.groups**power).mean())

    def waiting(self, power: int, at_most: float = float("inf")) -> float:
        """Mean of a power of the length times the tokens for which the response waits.

        A finished response waits until the longest of its group is finished; `at_most` counts no
        more than so many of those tokens.
        """
        longest = self.groups.max(dim=1, keepdim=True).values
        waited = (longest - self.groups).clamp(max=at_most)
        return float((self.groups**power * waited).mean())

    def longest_of(self, number: int) -> float:
        """Mean length of the longest of so many responses, as if independent."""
        lengths = self.groups.flatten().sort().values
        ranks = torch.arange(1, len(lengths) + 1, dtype=torch.float64) / len(lengths)
        below = ranks**number
        return float((lengths * below.diff(prepend=torch.zeros(1, dtype=torch.float64))).sum())


def sample_lengths(median: float, limit: int, group_size: int) -> Lengths:
    """The same lengths for the same arguments."""
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_GROUPS, group_size)
    prompts = torch.randn((NUM_GROUPS, 1), generator=generator, dtype=torch.float64)
    responses = torch.randn(shape, generator=generator, dtype=torch.float64)
    spread = PROMPT_SPREAD * prompts + RESPONSE_SPREAD * responses
    return Lengths((median * spread.exp()).clamp(1, limit))
