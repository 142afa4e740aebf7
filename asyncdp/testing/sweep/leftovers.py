"""What calls left behind in a client; this must be empty after every call, even after a cancelled one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from asyncdp.factory import layers_of
from asyncdp.middleware.port_rotation import PortRotation
from asyncdp.middleware.slot_retry import SlotRetry

if TYPE_CHECKING:
    from asyncdp.client import Client

__all__ = ["leftovers"]


def leftovers(client: Client) -> dict[str, Any]:
    """Return what calls left behind in a stack, by name; empty if there is nothing.

    This covers permits and probes of ports, waits that close() would have to end, calls in flight, and what a transport
    holds for a call that has ended (used connections, copies, reads, waiters). Pending outcomes are not included: they
    need I/O and are kept in ``client.env.pending_outcomes`` until the next mutation or close().
    """
    found = {"waits": len(client.env.open_waits.scopes), "calls in flight": vars(client)["_in_flight"].number}
    for layer in layers_of(client):
        found.update(_of(layer))
    return {name: count for name, count in found.items() if count}


# These read private attributes of our own layers and transports, which are of no use to users.
def _of(layer: Any) -> Iterator[tuple[str, int]]:
    if isinstance(layer, PortRotation):
        states = {} if layer._quarantine is None else layer._quarantine._states  # noqa: SLF001
        for key, state in states.items():
            yield f"permits of port {key}", state.in_flight
            yield f"probe of port {key}", int(state.probe is not None)
    elif isinstance(layer, SlotRetry):
        yield "watches of ids", len(layer._overlaps._watches)  # noqa: SLF001
    kinds = {kind.__name__ for kind in type(layer).__mro__}  # by name, without importing optional transports
    if "MemoryTransport" in kinds and not layer._closed:  # noqa: SLF001
        yield "waiters of the plane", len(layer.plane._wakers)  # noqa: SLF001
        for host in layer.plane.hosts.values():
            yield f"reads of {host.ref.id}", host.counts()["reading"]
    elif "UCXXTransport" in kinds:
        host_client = layer._resolver._host_client  # noqa: SLF001
        if host_client is not None:
            yield "copies on the lane", len(host_client._copying)  # noqa: SLF001
            for address, busy in host_client._pool._busy.items():  # noqa: SLF001
                yield f"connections in use to {address}", len(busy)
        link = layer._directory._link  # noqa: SLF001
        places = link._places  # noqa: SLF001
        yield "connections in use to the directory", link._settings.max_connections - places.value  # noqa: SLF001
