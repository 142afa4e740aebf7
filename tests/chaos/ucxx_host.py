"""A slot host whose first port can be muted and closed by signals: ``python -m tests.chaos.ucxx_host``.

SIGUSR1: the port accepts and never answers. SIGUSR2: the port is closed. SIGHUP: it is as before.
"""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

from asyncdp.transports.ucxx.host import main as host_process
from asyncdp.transports.ucxx.host.host import Host
from asyncdp.transports.ucxx.host.port import Port

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.wire.control import Control

__all__ = ["Fickle"]


class Fickle(Host):
    """A host with a port that does as it is told."""

    async def start(self) -> Any:
        """Start, and listen to signals."""
        self.mute = False
        self.streams: list[Control] = []
        report = await super().start()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._mute)
        loop.add_signal_handler(signal.SIGUSR2, self._close)
        loop.add_signal_handler(signal.SIGHUP, lambda: setattr(self, "again", loop.create_task(self._as_before())))
        return report

    def _serve(self, control: Control) -> None:
        if control._transport.get_extra_info("sockname")[1] == self._ports[0].number:
            self.streams = [stream for stream in self.streams if not stream.lost] + [control]
            if self.mute:
                return
        super()._serve(control)

    def _mute(self) -> None:
        self.mute = True
        for stream in self.streams:
            if not stream.lost:
                stream._transport.pause_reading()

    def _close(self) -> None:
        self._ports[0].close()
        for stream in self.streams:
            stream.end()

    async def _as_before(self) -> None:
        for stream in self.streams if self.mute else ():
            stream.end()
        self.mute = False
        if not self._ports[0]._listening:
            self._ports[0] = await Port.open(
                self.settings.bind, self._ports[0].number, self._pending_connections, self._serve
            )


if __name__ == "__main__":
    host_process.Host = Fickle  # type: ignore[misc]
    host_process.main()
