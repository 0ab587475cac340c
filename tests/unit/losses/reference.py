"""Algorithms 1 and 2 of the RollVerify paper, written out word for word with plain Python loops.

Slow on purpose, and knows nothing of the code under test: no torch, no packing, no vectors. A
trajectory is a list of segments, a segment a list of one number per token.
"""

import math


def ops_of_trajectory(updated, reference):
    """Algorithm 1, line 6: D_ij = |p_new_ij / p_old_ij - 1|, from log-probs."""
    shifts = []
    for updated_segment, reference_segment in zip(updated, reference, strict=True):
        segment_shifts = []
        for p_new, p_old in zip(updated_segment, reference_segment, strict=True):
            segment_shifts.append(abs(math.exp(p_new - p_old) - 1.0))
        shifts.append(segment_shifts)
    return shifts


def mean(values):
    """Arithmetic mean; a segment without tokens has nothing that could be off-policy."""
    total = 0.0
    for value in values:
        total += value
    return total / len(values) if values else 0.0


def verify_trajectory(shifts, d_s, d_t):
    """Algorithm 2. Returns (tokens kept, "none" | "segment" | "token", value that broke the rule).

    Sequence level: keep segments up to, and without, the first whose mean is >= d_s. Token level,
    over the concatenation of the kept segments: keep tokens up to, and without, the first >= d_t.
    """
    rule, value = "none", 0.0
    m = 0
    for i in range(1, len(shifts) + 1):
        if mean(shifts[i - 1]) >= d_s:
            rule, value = "segment", mean(shifts[i - 1])
            break
        m = i
    kept = []
    for segment in shifts[:m]:
        for shift in segment:
            kept.append(shift)
    n = len(kept)
    for j in range(1, len(kept) + 1):
        if kept[j - 1] >= d_t:
            rule, value = "token", kept[j - 1]
            n = j - 1
            break
    return n, rule, value
