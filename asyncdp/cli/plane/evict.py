"""The command ``asyncdp evict``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ..attached import MISTAKE, ConfigFile, Json, Partition, TimeoutS, Yes, ask, confirmed, fail, print_json
from ..tables import age, count, print_table, size

if TYPE_CHECKING:
    from asyncdp.client import Client
    from asyncdp.meta import DataPlaneGroupMeta

__all__ = ["evict"]

#: Most groups that are shown before the question.
SHOWN = 10


@dataclass(frozen=True)
class _Wanted:
    """Which groups to remove: those to which one of the first three applies, if they are old enough."""

    before: int | None
    lost: bool
    incomplete: bool
    older_than_s: float

    def __str__(self) -> str:
        """Return the groups in words: ``incomplete groups``."""
        kinds = ["incomplete groups"] if self.incomplete else []
        kinds += ["groups with lost rows"] if self.lost else []
        kinds += [] if self.before is None else [f"groups of versions below {self.before}"]
        old = f" that are {self.older_than_s:g} s old" if self.older_than_s else ""
        return f"{' or '.join(kinds)}{old}"

    def takes(self, group: DataPlaneGroupMeta, now: float) -> bool:
        if now - group.created_at < self.older_than_s:
            return False
        stale = self.before is not None and group.weight_version is not None and group.weight_version < self.before
        return stale or (self.lost and bool(group.lost_keys)) or (self.incomplete and not group.is_complete)


def evict(  # noqa: PLR0913 - the options of a command
    partition: Partition,
    *,
    older_than_version: Annotated[
        int | None, typer.Option(metavar="VERSION", help="Groups whose lowest weight version is below this one.")
    ] = None,
    lost: Annotated[bool, typer.Option("--lost", help="Groups that have lost rows.", show_default=False)] = False,
    incomplete: Annotated[
        bool,
        typer.Option(
            "--incomplete",
            help="Groups that lack rows; also those that are being written: see --older-than.",
            show_default=False,
        ),
    ] = False,
    older_than: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="Of all these, only groups at least so old.")
    ] = 0.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.", show_default=False)
    ] = False,
    yes: Yes = False,
    config: ConfigFile = None,
    timeout: TimeoutS = 30.0,
    as_json: Json = False,
) -> None:
    """Remove groups that are too old, or that can no longer become complete, after asking.

    A group is removed as it was listed: rows that are put anew meanwhile stay.
    """
    if older_than_version is None and not lost and not incomplete:
        fail("evict", "which groups? --older-than-version VERSION, --lost or --incomplete", MISTAKE)
    wanted = _Wanted(older_than_version, lost, incomplete, older_than)
    groups = ask("evict", config, lambda client: client.list_metadata(partition, timeout_s=timeout))
    now = time.time()
    chosen = [group for group in groups if wanted.takes(group, now)]
    rows = sum(len(group.keys) for group in chosen)
    what = f"{len(chosen)} of {len(groups)} groups: {count(rows)} rows, {size(sum(g.size_bytes for g in chosen))}"
    if chosen and not as_json:
        _show(chosen, now)
    if chosen and not dry_run:
        confirmed("evict", f"Remove {what}?", yes=yes)

        async def work(client: Client) -> None:
            for group in chosen:
                await client.evict(group, partition, timeout_s=timeout)

        ask("evict", config, work)
    if as_json:
        removed = [group.group_id for group in chosen]
        print_json({"partition_id": partition, "groups": removed, "rows": rows, "removed": not dry_run})
    else:
        typer.echo(f"{'would remove' if dry_run else 'removed'} {what}" if chosen else f"no {wanted} in {partition!r}")


def _show(chosen: list[DataPlaneGroupMeta], now: float) -> None:
    columns = ("group", "rows", "version", "age", "lost")
    shown = [
        (
            *(group.group_id, f"{len(group.keys)}/{group.expected_num_keys}"),
            *("-" if group.weight_version is None else group.weight_version, age(now - group.created_at)),
            len(group.lost_keys) or "-",
        )
        for group in chosen[:SHOWN]
    ]
    print_table(columns, shown, right=columns[1:])
    if len(chosen) > SHOWN:
        typer.echo(f"and {len(chosen) - SHOWN} more groups")
