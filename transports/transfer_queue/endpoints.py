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

    @classmethod
    def from_config(cls, given: Mapping[str, Any]) -> Server:
        """Read what :meth:`to_config` wrote."""
        return cls(str(given["id"]), str(given["ip"]), {str(k): int(v) for k, v in dict(given["ports"]).items()})

    def to_config(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {"id": self.id, "ip": self.ip, "ports": dict(self.ports)}

    def address(self, port_name: str) -> str:
        """Return the ZMQ address of a port."""
        host = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"tcp://{host}:{self.ports[port_name]}"


@dataclass(frozen=True, slots=True)
class Endpoints:
    """A controller and its storage units, in TransferQueue's order.

    Attributes:
        directory: Where the plane's directory listens, if the controller does not run it.
    """

    controller: Server
    units: tuple[Server, ...]
    directory: Server | None = None

    @property
    def directory_id(self) -> str:
        """Id of the server that runs the directory."""
        return self.controller.id if self.directory is None else self.directory.id

    @classmethod
    def from_config(cls, given: Mapping[str, Any]) -> Endpoints:
        """Read what :meth:`to_config` wrote.

        Raises:
            ValueError: It is not of that form.
        """
        try:
            servers = [Server.from_config(one) for one in (given["controller"], *given["units"])]
            beside = given.get("directory")
            directory = None if beside is None else Server.from_config(beside)
        except (AttributeError, KeyError, TypeError, ValueError) as err:
            msg = f"transfer_queue.endpoints: not of the form that attach_config() gives ({err!r})"
            raise ValueError(msg) from err
        return cls(servers[0], tuple(servers[1:]), directory)

    def to_config(self) -> dict[str, Any]:
        """Return it as plain values."""
        told = {"controller": self.controller.to_config(), "units": [unit.to_config() for unit in self.units]}
        return told if self.directory is None else {**told, "directory": self.directory.to_config()}
