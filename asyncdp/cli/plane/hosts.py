"""The command ``asyncdp hosts``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from ..attached import ConfigFile, Json, TimeoutS, ask, print_json
from ..tables import age, console, count, print_table, size

if TYPE_CHECKING:
    from asyncdp.meta import HostStatus

__all__ = ["fill", "hosts", "slots", "state"]

#: Columns of a terminal from which epochs, numbers of 16 digits, are shown; JSON always has them.
WITH_EPOCH = 100


def hosts(*, config: ConfigFile = None, timeout: TimeoutS = 10.0, as_json: Json = False) -> None:
    """List the slot hosts (of TransferQueue: the storage units): whether they answer, and how full they are."""
    found = ask("hosts", config, lambda client: client.list_hosts(timeout_s=timeout))
    if as_json:
        print_json([asdict(host) for host in found])
        return
    if not found:
        typer.echo("no slot host is registered")
        return
    columns = ("host", "state", "used", "rows", "slots", "heartbeat", "address", "epoch")
    rows = [
        (
            *(host.host_id, state(host), fill(host), count(host.rows), slots(host)),
            *(age(host.heartbeat_age_s), _where(host), host.epoch or "-"),
        )
        for host in found
    ]
    left_out = {name for at, name in enumerate(columns) if all(row[at] in ("", "-") for row in rows)}
    if console().width < WITH_EPOCH:
        left_out.add("epoch")
    kept = [at for at, name in enumerate(columns) if name not in left_out]
    right = ("used", "rows", "heartbeat", "epoch")
    print_table([columns[at] for at in kept], [[row[at] for at in kept] for row in rows], right=right)


def state(host: HostStatus) -> str:
    """Return whether a host answers, in a word."""
    if not host.alive:
        return "silent"
    return "draining" if host.draining else "answers"


def fill(host: HostStatus) -> str:
    """Return how full a host is: ``12% of 1.0 GiB``."""
    if not host.capacity_bytes or host.free_bytes is None:
        return "-"
    return f"{1 - host.free_bytes / host.capacity_bytes:.0%} of {size(host.capacity_bytes)}"


def slots(host: HostStatus) -> str:
    """Return the slots by state that there are: ``12 ready, 1 reading``."""
    return ", ".join(f"{count(number)} {name}" for name, number in host.slots.items() if number) or (
        "0" if host.slots else "-"
    )


def _where(host: HostStatus) -> str:
    ports = " ".join(map(str, host.ports))
    return f"{host.address}:{ports}" if host.address else ports
