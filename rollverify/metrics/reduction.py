"""Reduce per-rank numbers to the numbers of the whole run.

Knows nothing of means: add up numerators and denominators and divide afterwards. Percentiles cannot
be added up: gather the values.
"""

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def reduce_metrics(
    sums: dict[str, float],
    maxima: dict[str, float],
    group: dist.ProcessGroup | None = None,
) -> tuple[dict[str, float], dict[str, float]]:
    """Add up `sums` and take the largest of `maxima` over ranks.

    Collective: yes, over `group`; two all-reduces, float64, keys in sorted order. Every rank
    must pass the same keys. Without a process group the values come back unchanged.

    Args:
        sums: values to add.
        maxima: values to take the maximum of.
        group: the ranks that hold different data; None means all.

    Returns:
        The two reduced dicts, equal on every rank of the group.

    Raises:
        RuntimeError: if ranks pass as many keys but not the same ones.
    """
    if not dist.is_initialized():
        return dict(sums), dict(maxima)
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    sum_keys, max_keys = sorted(sums), sorted(maxima)
    # If all ranks agree, the largest checksum is also the smallest.
    checksum = float(zlib.crc32("\n".join([*sum_keys, "", *max_keys]).encode()))
    row = [*(maxima[key] for key in max_keys), checksum, -checksum]
    max_row = torch.tensor(row, dtype=torch.float64, device=device)
    dist.all_reduce(max_row, op=dist.ReduceOp.MAX, group=group)
    *max_values, highest, negated_lowest = max_row.tolist()
    if highest != -negated_lowest:
        raise RuntimeError("ranks try to reduce different metric keys; all must pass the same")

    sum_row = torch.tensor([sums[key] for key in sum_keys], dtype=torch.float64, device=device)
    if sum_keys:
        dist.all_reduce(sum_row, op=dist.ReduceOp.SUM, group=group)
    return (
        dict(zip(sum_keys, sum_row.tolist(), strict=True)),
        dict(zip(max_keys, max_values, strict=True)),
    )


def gather_values(rows: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Join lists of values over ranks, in the order of the ranks.

    Collective: yes, over `group`; two all-gathers, whatever the number of lists.

    Args:
        rows: [N_i] tensors of one dtype; the same number of them on every rank, lengths may differ.
        group: the ranks that hold different values.

    Returns:
        [sum of N_i over ranks] per list, same dtype, on the CPU; equal on every rank.
    """
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    lengths = torch.tensor([len(row) for row in rows], device=device)
    all_lengths = [torch.zeros_like(lengths) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_lengths, lengths, group=group)
    sizes = [part.tolist() for part in all_lengths]
    joined = torch.cat(list(rows))
    padded = joined.new_zeros(max(map(sum, sizes)), device=device)
    padded[: len(joined)] = joined
    gathered = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    parts = [
        values.cpu()[: sum(size)].split(size) for values, size in zip(gathered, sizes, strict=True)
    ]
    return [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
