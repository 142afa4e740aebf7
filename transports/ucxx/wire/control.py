"""The control stream of a connection: frames in, frames out, and its end noticed at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

from asyncdp.process.forks import on_fork, sever
from asyncdp.process.loop_end import abort

from .messages import (
    BODY_BYTES,
    GREETING_BYTES,
    HEAD_BYTES,
    Message,
    WireError,
    pack_frame,
    unpack_body,
    unpack_head,
)

__all__ = ["Control"]

M = TypeVar("M")
#: A peer that sends on without waiting for replies is read no further.
_QUEUED: Final = 2
#: Of what it had sent by then, so many messages are decoded at once.
_DECODED: Final = 64


class Control(asyncio.Protocol):
    """One end of a control stream.

    Anything that is not a frame of ours ends it at once. ``on_lost`` is called once, when the stream has ended; that is
    how the peer's death shows (5-25 ms after it).
    """

    def __init__(self, on_made: Callable[[Control], None] = lambda _: None) -> None:
        """Wait for the connection; ``on_made`` is told of it."""
        self.lost = False
        self.why: Exception | None = None
        self.on_lost: Callable[[], None] = lambda: None
        self.most = GREETING_BYTES
        self.peer = ""
        self.peer_address = ("", 0)
        self._on_made = on_made
        self._transport: Any = None
        self._buffer = bytearray()
        self._messages: deque[Message] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._paused = False
        self._full = False

    # -- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = transport
        on_fork(self)
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple):
            self.peer, self.peer_address = str(name[0]), (str(name[0]), int(name[1]))
        self._on_made(self)

    def data_received(self, data: bytes) -> None:
        """Take bytes; hand on whole messages."""
        self._buffer += data
        try:
            self._unpack()
        except WireError as err:
            self.end(err)

    def _unpack(self) -> None:
        while len(self._buffer) >= HEAD_BYTES and not self.lost and len(self._messages) < _DECODED:
            size = HEAD_BYTES + unpack_head(self._buffer[:HEAD_BYTES], self.most)
            if len(self._buffer) < size:
                return
            message = unpack_body(bytes(memoryview(self._buffer)[HEAD_BYTES:size]))
            del self._buffer[:size]
            self._messages.append(message)
            self._wake()
            if len(self._messages) >= _QUEUED and not self._paused:
                self._paused = True
                self._transport.pause_reading()

    def eof_received(self) -> bool:
        """The peer says no more."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        if self.lost:
            return
        self.lost = True
        self.why = self.why or exc
        self._wake()
        self.resume_writing()
        self.on_lost()

    def pause_writing(self) -> None:
        """Note that the peer takes bytes slower than they come."""
        self._full = True

    def resume_writing(self) -> None:
        """Note that it has caught up."""
        self._full = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- ours

    def open_up(self) -> None:
        """Allow long frames: the peer has shown that it knows the secret."""
        self.most = BODY_BYTES

    def end(self, why: Exception | None = None) -> None:
        """End the stream at once; what was queued is dropped. Twice is fine."""
        self.why = self.why or why
        if self._transport is not None:
            abort(self._transport)
        if not self.lost:
            self.connection_lost(why)

    def after_fork(self) -> None:
        """Hold the parent's connection no more: its peer has to see when the parent closes it."""
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            sever(sock.fileno())

    def close(self) -> None:
        """End the stream after what was sent."""
        if self._transport is not None:
            self._transport.close()

    async def send(self, message: Message) -> None:
        """Send a message; waits while the peer does not take what was sent before.

        Raises:
            ConnectionResetError: The stream has ended.
        """
        if self.lost:
            raise self._ended()
        self._transport.write(pack_frame(message))
        if self._full:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained
            if self.lost:
                raise self._ended()

    async def receive(self) -> Message:
        """Return the next message.

        Raises:
            ConnectionResetError: The stream has ended; its cause says why.
        """
        while not self._messages:
            if self.lost:
                raise self._ended()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        message = self._messages.popleft()
        if self._paused:
            self._paused = False
            if not self.lost:
                self._transport.resume_reading()
                self._unpack()
        return message

    @property
    def crowds(self) -> bool:
        """Whether the peer sent on without waiting for replies: two messages wait, and it may have one under way."""
        return len(self._messages) > 1

    async def expect(self, kind: type[M]) -> M:
        """Return the next message, which has to be of this kind.

        Raises:
            WireError: It is of another.
        """
        message = await self.receive()
        if not isinstance(message, kind):
            err = WireError(f"{type(message).__name__} came where {kind.__name__} was expected")
            self.end(err)
            raise err
        return message

    def _ended(self) -> ConnectionResetError:
        why = f": {self.why}" if self.why is not None else ""
        err = ConnectionResetError(f"the peer closed the connection{why}")
        err.__cause__ = self.why
        return err
