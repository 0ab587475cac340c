"""Plain-text tables for the end of a run. Does not print."""

from collections.abc import Sequence


def summary_table(rows: Sequence[Sequence[str]]) -> str:
    """Align rows of cells into a table; the first row is the header.

    The first column is aligned left, the others right, as numbers are.

    Args:
        rows: cells as they shall appear; every row as long as the first.

    Returns:
        The lines joined by newlines, without a trailing one; "" without rows.

    Raises:
        ValueError: if a row has another length than the header.
    """
    if not rows:
        return ""
    for number, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise ValueError(f"table row {number} has {len(row)} cells, header {len(rows[0])}")
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([lines[0], rule, *lines[1:]])
