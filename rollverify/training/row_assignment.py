"""Which items share a packed row, from their lengths alone. Knows nothing of what an item is."""

import bisect
from collections.abc import Sequence


def assign_rows(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put items into rows, longest first into the fullest row that has room.

    Args:
        lengths: tokens of each item, >= 0.
        max_tokens: limit of a row; a longer item gets a row of its own.

    Returns:
        Lists of item indices, each ascending; depends on the lengths alone.

    Source:
        Best-fit decreasing bin packing.
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (room, row), least room first
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect.bisect_left(open_rows, (lengths[item], -1))
        if place < len(open_rows):
            room, row = open_rows.pop(place)
        else:
            room, row = max_tokens, len(rows)
            rows.append([])
        rows[row].append(item)
        bisect.insort(open_rows, (room - lengths[item], row))
    return [sorted(row) for row in rows]


def even_row_tokens(total: int, max_tokens: int, rows_at_once: int) -> int:
    """Limit of a row so that rows worked on side by side are equally long.

    Args:
        total: tokens of all rows.
        max_tokens: of the rows worked on at the same time, together.
        rows_at_once: how many these are, >= 1.

    Returns:
        At most `max_tokens` / `rows_at_once`, >= 1; half a percent above an equal share, because
        items are whole.

    Source:
        Our choice.
    """
    limit = max(1, max_tokens // rows_at_once)
    num_rows = rows_at_once * -(-total // (rows_at_once * limit))
    return min(limit, total // num_rows + total // (200 * num_rows) + 1) if total else limit
