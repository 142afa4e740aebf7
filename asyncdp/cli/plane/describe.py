"""The commands ``asyncdp describe`` and ``asyncdp depth``."""

from __future__ import annotations

from dataclasses import asdict

import typer

from ..attached import ConfigFile, Json, Partition, TimeoutS, ask, print_json
from ..tables import count, print_table, size

__all__ = ["depth", "describe"]


def describe(
    partition: Partition, *, config: ConfigFile = None, timeout: TimeoutS = 30.0, as_json: Json = False
) -> None:
    """Show what a partition declares and how much it holds."""
    info = ask("describe", config, lambda client: client.describe(partition, timeout_s=timeout))
    if as_json:
        print_json(asdict(info))
        return
    group = "no groups" if info.grpo_group_size is None else f"groups of {info.grpo_group_size}"
    typer.echo(f"{info.partition_id}: {count(info.size)} samples (declared: {count(info.num_samples)}), {group}")
    typer.echo(f"payload: {size(info.size_bytes)}")
    typer.echo(f"consumer tasks: {', '.join(info.consumer_tasks) or 'none'}")
    print_table(("field", "type"), [(name, kind or "nothing written yet") for name, kind in info.fields.items()])


def depth(partition: Partition, *, config: ConfigFile = None, timeout: TimeoutS = 30.0, as_json: Json = False) -> None:
    """Print the number of groups that are committed and complete, claimed or not."""
    found = ask("depth", config, lambda client: client.depth(partition, timeout_s=timeout))
    if as_json:
        print_json({"partition_id": partition, "depth": found})
    else:
        typer.echo(found)
