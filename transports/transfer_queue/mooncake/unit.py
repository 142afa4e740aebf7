"""A storage unit that holds a segment of Mooncake's memory. It is shipped by value: its nodes need no asyncdp."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["PROTOCOL", "MooncakeUnit", "given_settings", "transport_settings"]

PROTOCOL, DEVICE, GID_INDEX = "MC_MOONCAKE_PROTOCOL", "MC_MOONCAKE_DEVICE", "MC_GID_INDEX"
#: Where Linux lists the devices that speak RDMA.
INFINIBAND = Path("/sys/class/infiniband")


def given_settings() -> dict[str, str]:
    """Return what the environment of this process says of Mooncake's network, by the variable's name."""
    return {name: os.environ[name] for name in (PROTOCOL, DEVICE, GID_INDEX) if os.environ.get(name)}


def transport_settings(ip: str, plane: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Set what Mooncake reads from the environment when it is imported, and return its protocol and device.

    ``MC_MOONCAKE_PROTOCOL`` is ``tcp`` (the default) or ``rdma``; ``MC_MOONCAKE_DEVICE`` names one device or several,
    with commas between them; where it is empty, ``rdma`` takes those of this machine that have an active port.
    ``MC_GID_INDEX`` is read by Mooncake itself.

    Args:
        ip: Address of this process at which Mooncake listens for payload.
        plane: Settings of the process that started the plane, which hold where this one has none; the protocol has to
            be the same.

    Raises:
        ValueError: One of the variables has a value that cannot be; the message names it.
    """
    told = {PROTOCOL: "tcp", **(plane or {}), **given_settings()}
    protocol, index = told[PROTOCOL], told.get(GID_INDEX)
    if protocol not in {"tcp", "rdma"}:
        raise ValueError(f"{PROTOCOL}: must be 'tcp' or 'rdma', not {protocol!r}")
    if plane is not None and protocol != plane.get(PROTOCOL, "tcp"):
        raise ValueError(
            f"{PROTOCOL}: {protocol!r} here, but the plane was started with {plane.get(PROTOCOL, 'tcp')!r}"
        )
    if index is not None:
        if not index.isdecimal():
            raise ValueError(f"{GID_INDEX}: must be the number of an entry, not {index!r}")
        os.environ[GID_INDEX] = index
    device = told.get(DEVICE, "")
    if protocol == "rdma":
        device = _rdma_devices(device)
    os.environ["MC_TCP_BIND_ADDRESS"] = ip
    os.environ["MC_STORE_MEMCPY"] = "0"
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
    return protocol, device


def _rdma_devices(named: str) -> str:
    """Return the devices that are named, if they are there; none named: those that have an active port."""
    there = {path.name for path in INFINIBAND.glob("*")}
    lacking = [name for name in named.split(",") if name and name not in there]
    if lacking:
        raise ValueError(
            f"{DEVICE}: {lacking[0]!r} is not there; {INFINIBAND} has {', '.join(sorted(there)) or 'none'}"
        )
    if named:
        return named
    states = INFINIBAND.glob("*/ports/*/state")
    active = {path.parents[2].name for path in states if "ACTIVE" in path.read_text(encoding="ascii")}
    if not active:
        raise ValueError(f"{DEVICE}: {PROTOCOL} is 'rdma', but no device in {INFINIBAND} has an active port")
    return ",".join(sorted(active))


class MooncakeUnit:
    """Holds a segment until it is shut down, and a port on which heartbeats notice its end.

    Args:
        master: ``host:port`` of Mooncake's master.
        segment_bytes: Size of the segment.
        buffer_bytes: Size of Mooncake's own buffer in this process.
        ip: Address to listen at; None: that of the Ray node.
        plane: As in :func:`transport_settings`.

    Raises:
        ImportError: Mooncake, or a library that it needs, is missing.
        RuntimeError: Mooncake refused the segment.
    """

    def __init__(
        self,
        master: str,
        segment_bytes: int,
        buffer_bytes: int,
        ip: str | None = None,
        plane: Mapping[str, str] | None = None,
    ) -> None:
        """Connect to the master and offer the segment."""
        if ip is None:
            import ray

            ip = ray.util.get_node_ip_address()
        protocol, device = transport_settings(ip, plane)
        import zmq
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        sockets: Any = zmq

        self._store = MooncakeDistributedStore()
        code = self._store.setup(ip, "P2PHANDSHAKE", segment_bytes, buffer_bytes, protocol, device, master)
        if code:
            msg = f"Mooncake could not offer a segment of {segment_bytes} bytes to the master at {master}: code {code}"
            raise RuntimeError(msg)
        name = self._store.get_hostname()
        self._context: Any = sockets.Context()
        self._socket = self._context.socket(sockets.ROUTER)
        port = self._socket.bind_to_random_port(f"tcp://{ip}")
        where = ReplicateConfig()
        where.preferred_segment = name
        probe = f"asyncdp/probe/{uuid.uuid4().hex}"
        code = self._store.put(probe, b"asyncdp", where)
        found = self._store.batch_get_replica_desc([probe]).get(probe, ())
        if code or not found:
            msg = f"Mooncake could not store anything in the segment {name}: code {code}"
            raise RuntimeError(msg)
        endpoint = found[0].get_memory_descriptor().buffer_descriptor.transport_endpoint
        self._store.remove(probe, True)
        ports = {"put_get_socket": port, "segment": _port(name), "transfer": _port(endpoint)}
        self._told = (f"MooncakeUnit_{uuid.uuid4().hex[:8]}", ip, ports)

    def get_server(self) -> tuple[str, str, dict[str, int]]:
        """Return id, address and ports: of heartbeats, and by which Mooncake names the segment and its payload."""
        return self._told

    def shutdown(self) -> None:
        """Give up the segment with all rows in it."""
        self._socket.close(0)
        self._store.close()


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
