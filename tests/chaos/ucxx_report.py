"""Prints what the faults did, as a table: with rich where it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.chaos.ucxx_tally import Tally

__all__ = ["show"]

HEAD = ("fault", "verbs", "answered", "errors by class", "longest call", "loop gap", "noticed after", "seen")


def _row(tally: Tally) -> tuple[str, ...]:
    errors = ", ".join(f"{name.removeprefix('DataPlane')} {count}" for name, count in tally.errors.most_common())
    verb, longest = tally.longest
    return (
        tally.fault,
        str(tally.verbs),
        str(tally.right),
        errors or "-",
        f"{longest:.2f} s {verb}",
        f"{tally.gap_s * 1e3:.0f} ms",
        "-" if tally.notice_s is None else f"{tally.notice_s * 1e3:.0f} ms",
        tally.afterwards,
    )


def show(title: str, tallies: Sequence[Tally], account: dict[str, int]) -> None:
    """Print the table and the account."""
    rows = [_row(tally) for tally in tallies]
    told = ", ".join(f"{name}: {count}" for name, count in account.items())
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
        print(f"\n{title}")  # noqa: T201 - a report
        for row in (HEAD, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())  # noqa: T201
        print(f"rows: {told}", flush=True)  # noqa: T201
        return
    table = Table(*HEAD, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    console = Console(width=180)
    console.print(table)
    console.print(f"rows: {told}")
