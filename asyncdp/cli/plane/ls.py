"""The command ``asyncdp ls``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..attached import ConfigFile, Json, TimeoutS, ask, print_json
from ..tables import age, count, print_table, size

if TYPE_CHECKING:
    from asyncdp.client import Client
    from asyncdp.meta import DataPlaneGroupMeta, PartitionInfo

__all__ = ["ls"]


def ls(
    partition: Annotated[str | None, typer.Argument(help="The partition; none: list the partitions.")] = None,
    *,
    limit: Annotated[int, typer.Option(min=1, help="Most groups to show, oldest first; JSON has all.")] = 50,
    config: ConfigFile = None,
    timeout: TimeoutS = 30.0,
    as_json: Json = False,
) -> None:
    """List the partitions of a plane, or the groups of one partition, oldest first."""
    if partition is None:
        _partitions(ask("ls", config, lambda client: client.list_partitions(timeout_s=timeout)), as_json=as_json)
        return

    async def work(client: Client) -> list[DataPlaneGroupMeta]:
        return await client.list_metadata(partition, timeout_s=timeout)

    groups = ask("ls", config, work)
    if as_json:
        print_json([group_as_json(group) for group in groups])
        return
    _groups(groups, limit)


def _partitions(partitions: list[PartitionInfo], *, as_json: bool) -> None:
    from asyncdp.metrics.published import PARTITION

    found = [one for one in partitions if one.partition_id != PARTITION]
    if as_json:
        print_json([_info(one) for one in found])
        return
    if not found:
        typer.echo("no partitions")
        return
    rows = [
        (
            *(one.partition_id, count(one.size), size(one.size_bytes), len(one.fields), one.grpo_group_size or "-"),
            ", ".join(one.consumer_tasks),
        )
        for one in sorted(found, key=lambda one: one.partition_id)
    ]
    columns = ("partition", "samples", "size", "fields", "group", "tasks")
    print_table(columns, rows, right=columns[1:5])


def _info(one: PartitionInfo) -> dict[str, Any]:
    names = ("partition_id", "size", "size_bytes", "consumer_tasks", "num_samples", "grpo_group_size")
    return {name: getattr(one, name) for name in names}


def group_as_json(group: DataPlaneGroupMeta) -> dict[str, Any]:
    """Return a group as plain values, without handles and tags."""
    return {
        "group_id": group.group_id,
        "keys": list(group.keys),
        "expected_num_keys": group.expected_num_keys,
        "weight_version": group.weight_version,
        "created_at": group.created_at,
        "committed": group.committed,
        "complete": group.is_complete,
        "lost_keys": list(group.lost_keys),
        "size_bytes": group.size_bytes,
    }


def _groups(groups: list[DataPlaneGroupMeta], limit: int) -> None:
    if not groups:
        typer.echo("no groups")
        return
    now = time.time()
    columns = ("group", "rows", "version", "age", "state", "lost", "size")
    rows = [
        (
            group.group_id,
            f"{len(group.keys)}/{group.expected_num_keys}",
            "-" if group.weight_version is None else group.weight_version,
            age(now - group.created_at),
            _state(group),
            len(group.lost_keys) or "-",
            size(group.size_bytes),
        )
        for group in groups[:limit]
    ]
    print_table(columns, rows, right=("rows", "version", "age", "lost", "size"))
    complete = sum(group.is_complete and group.committed for group in groups)
    lost = sum(len(group.lost_keys) for group in groups)
    total = size(sum(group.size_bytes for group in groups))
    more = f"{len(groups) - limit} more groups (--limit); " if len(groups) > limit else ""
    typer.echo(f"{more}{len(groups)} groups, {complete} of them ready to train on, {lost} rows lost, {total}")


def _state(group: DataPlaneGroupMeta) -> str:
    if group.lost_keys:
        return "lost rows"
    if not group.committed:
        return "uncommitted"
    return "complete" if group.is_complete else "incomplete"
