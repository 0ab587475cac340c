"""Mean, percentiles and maximum of a list of counts.

Does not gather over ranks: percentiles cannot be averaged, so gather the values first.
"""

from collections.abc import Sequence


def distribution(prefix: str, values: Sequence[int]) -> dict[str, float]:
    """Metrics `<prefix>_mean`, `_p50`, `_p95` and `_max` of some counts.

    Percentiles interpolate linearly between the two nearest ranks.

    Args:
        prefix: metric key without the ending, such as "rollout/response_tokens".
        values: the counts, in any order.

    Returns:
        The four metrics; nothing if there are no values, because no number would be true.
    """
    if not values:
        return {}
    ordered = sorted(values)
    return {
        f"{prefix}_mean": sum(ordered) / len(ordered),
        f"{prefix}_p50": _percentile(ordered, 0.50),
        f"{prefix}_p95": _percentile(ordered, 0.95),
        f"{prefix}_max": float(ordered[-1]),
    }


def _percentile(ordered: Sequence[int], share: float) -> float:
    rank = share * (len(ordered) - 1)
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (rank - below) * (ordered[above] - ordered[below])
