"""Where the servers of a TransferQueue listen, as it travels in a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Endpoints", "Server"]


@dataclass(frozen=True, slots=True)
class Server:
    """One server: TransferQueue's id of it (another life, another id), its IP, its ports by name."""

    id: str
    ip: str
    ports: Mapping[str, int]

    def address(self, port_name: str) -> str:
        """Return the ZMQ address of a port."""
        host = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"tcp://{host}:{self.ports[port_name]}"


@dataclass(frozen=True, slots=True)
class Endpoints:
    """A controller and its storage units, in TransferQueue's order."""

    controller: Server
    units: tuple[Server, ...]

    @classmethod
    def from_config(cls, given: Mapping[str, Any]) -> Endpoints:
        """Read what :meth:`to_config` wrote.

        Raises:
            ValueError: It is not of that form.
        """
        try:
            servers = [
                Server(str(one["id"]), str(one["ip"]), {str(k): int(v) for k, v in dict(one["ports"]).items()})
                for one in (given["controller"], *given["units"])
            ]
        except (KeyError, TypeError, ValueError) as err:
            msg = f"transfer_queue.endpoints: not of the form that attach_config() gives ({err!r})"
            raise ValueError(msg) from err
        return cls(servers[0], tuple(servers[1:]))

    def to_config(self) -> dict[str, Any]:
        """Return it as plain values."""

        def plain(server: Server) -> dict[str, Any]:
            return {"id": server.id, "ip": server.ip, "ports": dict(server.ports)}

        return {"controller": plain(self.controller), "units": [plain(unit) for unit in self.units]}
