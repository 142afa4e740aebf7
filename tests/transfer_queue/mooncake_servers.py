"""A controller of TransferQueue, Mooncake's master and the units that hold its segments, without Ray."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncdp.transports.transfer_queue.endpoints import Server
from asyncdp.transports.transfer_queue.mooncake.master import Master
from asyncdp.transports.transfer_queue.mooncake.store import shared_store
from tests.transfer_queue.servers import Servers, _rest

__all__ = ["SIZES", "MooncakeServers"]

#: What each unit gives, and the buffer of each process.
SIZES = {"global_segment_size": 256 << 20, "local_buffer_size": 16 << 20}


def _unit(pipe: Any, argument: tuple[Any, ...]) -> None:
    from asyncdp.transports.transfer_queue.mooncake.unit import MooncakeUnit

    unit = MooncakeUnit(*argument)
    pipe.send(Server(*unit.get_server()))
    _rest(pipe)


class MooncakeServers(Servers):
    """As :class:`Servers`, with segments of Mooncake instead of TransferQueue's storage units.

    Args:
        segment_bytes: Size of each of the two segments.
    """

    def __init__(self, segment_bytes: int = SIZES["global_segment_size"]) -> None:
        """Start them."""
        buffer = SIZES["local_buffer_size"]
        self.master = Master("127.0.0.1")
        try:
            super().__init__(units=0)
            argument = (self.master.address, segment_bytes, buffer, "127.0.0.1")
            units = tuple(self._start(_unit, argument) for _ in range(2))
        except BaseException:
            self.master.stop()
            raise
        told = {"master": self.master.address, "buffer_bytes": buffer, "protocol": "tcp"}
        self.endpoints = replace(self.endpoints, units=units, mooncake=told)
        #: The connection of this process, which all of its clients share: no test waits until it is closed.
        self.store = shared_store(self.endpoints.controller.id, ip="127.0.0.1", **told)

    def close(self) -> None:
        """End all processes, the master last."""
        self.store.close()
        super().close()
        self.master.stop()
