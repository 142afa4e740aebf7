"""Tables and quantities as the commands print them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["age", "console", "count", "cut", "print_table", "size", "table"]

#: Columns of output that goes to no terminal: nothing is cut there.
WIDE = 240


def console(**more: Any) -> Console:
    """Return a console that takes text as it is; names of partitions and samples may hold anything."""
    made = Console(markup=False, emoji=False, highlight=False, soft_wrap=False, **more)
    if not made.is_terminal and "COLUMNS" not in os.environ and "width" not in more:
        made.width = WIDE
    return made


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Iterable[str] = ()) -> Table:
    """Make a table; the columns named in ``right`` are aligned to the right and never cut."""
    numbers = set(right)
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        made.add_column(
            name,
            justify="right" if name in numbers else "left",
            no_wrap=name in numbers,
            overflow="fold",
        )
    for row in rows:
        made.add_row(*("" if one is None else str(one) for one in row))
    return made


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Iterable[str] = ()) -> None:
    """Print a table to standard output."""
    console().print(table(columns, rows, right=right))


def size(nbytes: float | None) -> str:
    """Return bytes as text, in powers of 1024."""
    if nbytes is None:
        return "-"
    value, units = float(nbytes), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units:
        if abs(value) < 1024 or unit == units[-1]:  # noqa: PLR2004 - a KiB
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"  # noqa: PLR2004
        value /= 1024
    raise AssertionError


def age(seconds: float | None) -> str:
    """Return a duration as text: ``0.4 s``, ``12 s``, ``3 min``, ``5 h``, ``2 d``."""
    if seconds is None:
        return "-"
    seconds = max(0.0, seconds)
    for limit, unit, divisor in ((10, "s", 1), (120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds:.1f} {unit}" if limit == 10 else f"{seconds / divisor:.0f} {unit}"  # noqa: PLR2004
    return f"{seconds / 86400:.0f} d"


def count(number: int | None) -> str:
    """Return a number as text with thousands apart."""
    return "-" if number is None else f"{number:,}"


def cut(text: str, limit: int) -> str:
    """Return a text of at most ``limit`` characters, the end of a longer one cut off."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
