"""Addresses of the servers of a TransferQueue, with their form in a config."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Endpoints", "Server", "address_towards"]

#: What clients are told of a plane's Mooncake.
MOONCAKE = {"master": str, "buffer_bytes": int, "protocol": str}


@dataclass(frozen=True, slots=True)
class Server:
    """Address of one server: TransferQueue's id (a restarted server has another one), IP, and ports by name."""

    id: str
    ip: str
    ports: Mapping[str, int]

    @classmethod
    def from_config(cls, given: Mapping[str, Any]) -> Server:
        """Make it from the plain values of :meth:`to_config`."""
        return cls(str(given["id"]), str(given["ip"]), {str(k): int(v) for k, v in dict(given["ports"]).items()})

    def to_config(self) -> dict[str, Any]:
        """Return it as plain values for a config."""
        return {"id": self.id, "ip": self.ip, "ports": dict(self.ports)}

    def address(self, port_name: str) -> str:
        """Return the ZMQ address of a port."""
        host = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"tcp://{host}:{self.ports[port_name]}"


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses of a controller and of its storage units, in TransferQueue's order.

    Attributes:
        directory: Address of the plane's directory if it runs beside the controller; None: the controller runs it.
        mooncake: ``master`` (``host:port`` of Mooncake's master), ``buffer_bytes`` (of a client's own buffer) and
            ``protocol`` (of payload) if the units hold segments of Mooncake; None: they are TransferQueue's own.
    """

    controller: Server
    units: tuple[Server, ...]
    directory: Server | None = None
    mooncake: Mapping[str, Any] | None = None

    @property
    def directory_id(self) -> str:
        """Id of the server that runs the plane's directory."""
        return self.controller.id if self.directory is None else self.directory.id

    @classmethod
    def from_config(cls, given: Mapping[str, Any]) -> Endpoints:
        """Make them from the plain values of :meth:`to_config`.

        Raises:
            ValueError: The values do not have this form.
        """
        try:
            servers = [Server.from_config(one) for one in (given["controller"], *given["units"])]
            beside = given.get("directory")
            directory = None if beside is None else Server.from_config(beside)
            told = given.get("mooncake")
            mooncake = None if told is None else {name: kind(told[name]) for name, kind in MOONCAKE.items()}
        except (AttributeError, KeyError, TypeError, ValueError) as err:
            msg = f"transfer_queue.endpoints: not of the form that attach_config() gives ({err!r})"
            raise ValueError(msg) from err
        return cls(servers[0], tuple(servers[1:]), directory, mooncake)

    def to_config(self) -> dict[str, Any]:
        """Return it as plain values for a config."""
        told: dict[str, Any] = {
            "controller": self.controller.to_config(),
            "units": [unit.to_config() for unit in self.units],
        }
        if self.mooncake is not None:
            told["mooncake"] = dict(self.mooncake)
        return told if self.directory is None else {**told, "directory": self.directory.to_config()}


def address_towards(server: Server) -> str:
    """Return this machine's own IP address on the route to a server."""
    family = socket.AF_INET6 if ":" in server.ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a UDP socket sends nothing
        probe.connect((server.ip, next(iter(server.ports.values()))))
        address: str = probe.getsockname()[0]
    return address
