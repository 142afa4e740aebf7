"""A storage unit that holds a segment of Mooncake's memory. It is shipped by value: its nodes need no asyncdp."""

from __future__ import annotations

import os
import uuid
from typing import Any

__all__ = ["MooncakeUnit", "transport_settings"]


def transport_settings(ip: str) -> tuple[str, str]:
    """Set what Mooncake reads from the environment when it is imported, and return its protocol and device.

    ``MC_MOONCAKE_PROTOCOL`` (``tcp`` by default) and ``MC_MOONCAKE_DEVICE`` (empty: Mooncake looks for one) are read.

    Args:
        ip: Address of this process at which Mooncake listens for payload.
    """
    os.environ["MC_TCP_BIND_ADDRESS"] = ip
    os.environ["MC_STORE_MEMCPY"] = "0"
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
    return os.environ.get("MC_MOONCAKE_PROTOCOL", "tcp"), os.environ.get("MC_MOONCAKE_DEVICE", "")


class MooncakeUnit:
    """Holds a segment until it is shut down, and a port on which heartbeats notice its end.

    Args:
        master: ``host:port`` of Mooncake's master.
        segment_bytes: Size of the segment.
        buffer_bytes: Size of Mooncake's own buffer in this process.
        ip: Address to listen at; None: that of the Ray node.

    Raises:
        ImportError: Mooncake, or a library that it needs, is missing.
        RuntimeError: Mooncake refused the segment.
    """

    def __init__(self, master: str, segment_bytes: int, buffer_bytes: int, ip: str | None = None) -> None:
        """Connect to the master and offer the segment."""
        if ip is None:
            import ray

            ip = ray.util.get_node_ip_address()
        protocol, device = transport_settings(ip)
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
