"""The control stream of a connection: it sends and receives frames, and reports its end at once."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from asyncdp.process.forks import on_fork, replace_by_unconnected
from asyncdp.process.loop_end import abort

from .messages import (
    ALL_KINDS,
    BODY_BYTES,
    GREETING_BYTES,
    HEAD_BYTES,
    START_BYTES,
    Kinds,
    Message,
    WireError,
    check_length,
    pack_frame,
    unpack_body,
    unpack_head,
)

__all__ = ["LARGE_BYTES", "Control"]

M = TypeVar("M")
LARGE_BYTES: Final = 1 << 20
#: Seconds within which a peer has to take what was sent to it before the stream was closed.
_CLOSES_S: Final = 5.0
#: SO_LINGER of 0 s: the kernel drops what it has not sent and resets the connection, instead of keeping both.
_NO_LINGER: Final = struct.pack("ii", 1, 0)


class Control(asyncio.Protocol):
    """One end of a control stream.

    A message is decoded when it is taken, since it then takes many times its length. Bytes that are no valid frame end
    the stream once the messages before them were taken. ``on_lost`` is called once, when the stream has ended; this is
    how the death of the peer is noticed (5-25 ms after it).
    """

    def __init__(
        self,
        on_made: Callable[[Control], None] = lambda _: None,
        challenge: bytes = b"",
        peer_address: tuple[str, int] = ("", 0),
        kinds: Kinds = ALL_KINDS,
    ) -> None:
        """Initialise the state; ``on_made`` is called with this object once it is connected.

        Args:
            on_made: Called with this object.
            challenge: Nonce that the peer was sent already; "": none was.
            peer_address: Address and port number of the peer, where it is known from ``accept``. A socket that the peer
                has reset tells it no more.
            kinds: Messages that the peer may send; others end the stream.
        """
        self.challenge = challenge
        self._kinds = kinds
        self.lost = False
        self.why: Exception | None = None
        self.on_lost: Callable[[], None] = lambda: None
        #: Called when bytes have come and more than ``LARGE_BYTES`` are kept.
        self.on_large: Callable[[], None] = lambda: None
        self.kept_since = 0.0
        self.most = GREETING_BYTES
        self.peer, self.peer_address = peer_address[0], peer_address
        self._on_made = on_made
        self._transport: Any = None
        self._buffer = bytearray()
        #: Bytes of the first frame in the buffer where it is complete; else 0.
        self._whole = 0
        self._waiter: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._paused = False
        self._full = False
        self._closing: asyncio.TimerHandle | None = None

    # -- callbacks of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport, and report the connection."""
        self._transport = transport
        on_fork(self)
        name = transport.get_extra_info("peername")
        if not self.peer and isinstance(name, tuple):
            self.peer, self.peer_address = str(name[0]), (str(name[0]), int(name[1]))
        self._on_made(self)

    def data_received(self, data: bytes) -> None:
        """Buffer bytes."""
        if not self._buffer:
            self.kept_since = time.monotonic()
        self._buffer += data
        if not self._whole:
            self._look()
        if self._paused or len(self._buffer) > self._whole:
            self._pause_or_resume()
        if len(self._buffer) > LARGE_BYTES:
            self.on_large()

    def _look(self) -> None:
        """Check the head of the first frame in the buffer, and whether the frame is complete."""
        if len(self._buffer) < HEAD_BYTES:
            return
        try:
            length = unpack_head(self._buffer, self.most)
            if length > GREETING_BYTES:
                # A body that is too long for its kind is refused by its first bytes, not kept until it is complete.
                check_length(self._buffer[HEAD_BYTES : HEAD_BYTES + START_BYTES], length, self._kinds)
        except WireError as err:
            self.end(err)
            return
        if len(self._buffer) >= HEAD_BYTES + length:
            self._whole = HEAD_BYTES + length
            self._wake()

    def _pause_or_resume(self) -> None:
        """Read on from the peer only where it has sent nothing behind a message that was not taken yet."""
        full = self.pipelines
        if full is not self._paused and not self.lost:
            self._paused = full
            if full:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def eof_received(self) -> bool:
        """Let asyncio close the transport when the peer has closed its side."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Mark the stream as ended and wake its waiters."""
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
        if self.lost:
            return
        self.lost = True
        self.why = self.why or exc
        self._wake()
        self.resume_writing()
        self.on_lost()

    def pause_writing(self) -> None:
        """Make senders wait: the transport's buffer is full."""
        self._full = True

    def resume_writing(self) -> None:
        """Let senders continue: the transport's buffer has drained."""
        self._full = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- use

    def hung_up(self) -> bool:
        """Return whether the peer has closed its side, as the kernel says, which the event loop may not know yet."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        if self.lost or sock is None or sock.fileno() < 0:
            return True
        look = select.poll()
        look.register(sock, select.POLLRDHUP)
        return bool(look.poll(0))

    def open_up(self) -> None:
        """Allow frames of full length, after the peer has authenticated."""
        self.most = BODY_BYTES

    def end(self, why: Exception | None = None) -> None:
        """End the stream at once; unsent bytes are dropped. Idempotent."""
        self.why = self.why or why
        self._buffer.clear()
        self._whole = 0
        if self._transport is not None:
            abort(self._transport)
        if not self.lost:
            self.connection_lost(why)

    def after_fork(self) -> None:
        """Close the socket in a forked child, so that the peer notices when the parent closes the connection."""
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            replace_by_unconnected(sock.fileno())

    def close(self) -> None:
        """End the stream once all was sent, or after ``_CLOSES_S`` where the peer does not take it. Idempotent."""
        if self._transport is None or self._closing is not None or self.lost:
            return
        self._closing = asyncio.get_running_loop().call_later(_CLOSES_S, self.reset)
        self._transport.close()

    def reset(self) -> None:
        """End the stream at once, and have the kernel too drop what the peer has not taken."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):  # it is closed already
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.end()

    async def send(self, message: Message) -> None:
        """Send a message; wait while the transport's buffer is full.

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
        await self.arrival()
        return self.take()

    async def arrival(self) -> int:
        """Wait until the next message has come; return the length of its body in bytes.

        Raises:
            ConnectionResetError: The stream has ended; its cause says why.
        """
        while not self._whole:
            if self.lost:
                raise self._ended()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._whole - HEAD_BYTES

    def take(self) -> Message:
        """Decode and return the message that has come.

        Raises:
            ConnectionResetError: The stream has ended since; its cause says why.
        """
        if not self._whole:
            raise self._ended()
        body = self._buffer[HEAD_BYTES : self._whole]
        del self._buffer[: self._whole]
        self._whole = 0
        try:
            message = unpack_body(body, self._kinds)
        except WireError as err:
            self.end(err)
            raise self._ended() from err
        if self._buffer:
            self._look()
        if self._paused or self._buffer:
            self._pause_or_resume()
        return message

    @property
    def kind(self) -> int:
        """Number of the kind of the message that has come and was not taken."""
        return self._buffer[HEAD_BYTES + 1]

    @property
    def kept_bytes(self) -> int:
        """Bytes that have come and were not taken."""
        return len(self._buffer)

    @property
    def pipelines(self) -> bool:
        """Whether the peer sent on without awaiting replies: more has come behind a message that was not taken."""
        return 0 < self._whole < len(self._buffer)

    async def expect(self, kind: type[M]) -> M:
        """Return the next message, which has to be of this kind.

        Raises:
            WireError: It is of another kind; the stream is ended.
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
