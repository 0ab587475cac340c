"""Tables as Markdown, CSV and JSON values. Computes no figure."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from rollverify.metrics.statistics import Interval, Spread

NOTHING = "–"  # noqa: RUF001 (a dash is what a reader expects in an empty cell)

_FORMATS = {"share": ".3f", "reward": ".3f", "nats": ".3f", "1": ".2g", "steps": ".2f"}
_FORMATS |= {"s": ",.1f"}
"""By unit; everything else is a whole number."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Table:
    """Cells under a title, with a note that says how to read them."""

    title: str
    rows: Sequence[Sequence[str]]
    """The first is the header."""
    note: str = ""


def number(value: float | None, unit: str) -> str:
    """A number with as many digits as its unit deserves."""
    return NOTHING if value is None else format(value, _FORMATS.get(unit, ",.0f"))


def spread_cell(found: Spread | None, unit: str, planned: int) -> str:
    """Mean and standard deviation over seeds, and how many of the planned ones there are."""
    if found is None:
        return NOTHING
    text = number(found.mean, unit)
    if found.std is not None:
        text += f" ± {number(found.std, unit)}"
    return text if found.num == planned else f"{text} ({found.num} of {planned})"


def interval_cell(found: Interval | None, unit: str, sign: bool = False) -> str:
    """An interval in brackets."""
    if found is None:
        return NOTHING
    form = ("+" if sign else "") + _FORMATS.get(unit, ",.0f")
    return f"[{found.low:{form}}, {found.high:{form}}]"


def to_markdown(table: Table) -> str:
    """The table with its title as a heading of the second level."""
    lines = [f"## {table.title}", ""]
    if table.note:
        lines += [table.note, ""]
    header, *rows = table.rows
    lines.append(_line(header))
    lines.append(_line(["---", *["---:"] * (len(header) - 1)]))
    lines += [_line(row) for row in rows]
    return "\n".join(lines) + "\n"


def to_csv(rows: Sequence[Sequence[object]]) -> str:
    """Rows as CSV text; None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
