"""Peers that have connected and sent nothing yet: each is a socket and a challenge, until it answers.

Most peers of an attack never answer. Kept like this they cost a third of a session, so thousands of them keep no client
waiting.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from ...wire.control import Control
from ...wire.messages import REQUESTS, Challenge, pack_frame
from .eviction import source_of, to_evict

__all__ = ["PendingConnections"]

#: Most peers that are kept; beyond that one of the source that has the most makes room for the next.
MOST: Final = 96
_NONCE_BYTES: Final = 32

Made = Callable[[Control], None]


class _Pending(NamedTuple):
    nonce: bytes
    made: Made
    until: float
    address: tuple[str, int]


class PendingConnections:
    """Sends each new peer its challenge, and makes a stream of it once it answers.

    Args:
        patience_s: Seconds that a peer may send nothing.
    """

    def __init__(self, patience_s: float) -> None:
        """Start with nobody waiting."""
        self._patience_s = patience_s
        self._pending: dict[socket.socket, _Pending] = {}  # the earliest first
        self._sources: dict[socket.socket, str] = {}  # of the same
        self._entering: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, sock: socket.socket, made: Made, address: tuple[str, int]) -> None:
        """Take a connection from ``address``; ``made`` is called with its stream once the peer has sent something."""
        if len(self._pending) >= MOST:
            self._leave(to_evict(self._sources)).close()
        loop, nonce = asyncio.get_running_loop(), os.urandom(_NONCE_BYTES)
        sock.settimeout(0.0)
        try:
            sock.send(pack_frame(Challenge(nonce)))
        except OSError:
            sock.close()
            return
        self._pending[sock] = _Pending(nonce, made, loop.time() + self._patience_s, address)
        self._sources[sock] = source_of(address[0])
        loop.add_reader(sock.fileno(), self._answered, sock)  # by number: for a socket, selectors formats its repr
        if self._timer is None:
            self._timer = loop.call_later(self._patience_s, self._expire)

    def _leave(self, sock: socket.socket) -> socket.socket:
        asyncio.get_running_loop().remove_reader(sock.fileno())
        del self._pending[sock], self._sources[sock]
        return sock

    def _answered(self, sock: socket.socket) -> None:
        peer = self._pending[sock]
        self._leave(sock)
        said = b""
        with suppress(OSError):
            said = sock.recv(1, socket.MSG_PEEK)
        if not said:
            sock.close()
            return
        task = asyncio.get_running_loop().create_task(self._accept(sock, peer))
        self._entering.add(task)
        task.add_done_callback(self._entering.discard)

    async def _accept(self, sock: socket.socket, peer: _Pending) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: Control(peer.made, peer.nonce, peer.address, REQUESTS), sock)
        except OSError:
            sock.close()

    def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._pending:
            sock, peer = next(iter(self._pending.items()))
            if peer.until > loop.time():
                self._timer = loop.call_at(peer.until, self._expire)
                return
            self._leave(sock).close()

    def clear(self, made: Made | None = None) -> None:
        """Close the connections of all, or of those for whom ``made`` would be called."""
        for sock in [sock for sock, peer in self._pending.items() if made is None or peer.made is made]:
            self._leave(sock).close()
        if self._timer is not None and not self._pending:
            self._timer.cancel()
            self._timer = None
