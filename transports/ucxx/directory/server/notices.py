"""Notices: the server publishes that a partition changed, so that waiting calls need not poll."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any, Self

import anyio
from redis.exceptions import NoPermissionError, RedisError

if TYPE_CHECKING:
    from types import TracebackType

    from redis.asyncio.connection import AbstractConnection

    from .link import DirectoryLink

__all__ = ["Notices"]

#: Consecutive notices of a channel without waiters after which it is unsubscribed.
MOST_UNHEARD = 64
#: Seconds to wait for the confirmation of a subscription; without it the waiter polls in its own intervals.
CONFIRM_S = 1.0


class Notices:
    """Receives notices on one connection, which is opened at the first wait.

    A notice may be lost when the connection breaks, so waiters also poll, at longer intervals. For a user of the server
    that may not subscribe, waiters only poll.

    Args:
        link: Connections to the server.
    """

    def __init__(self, link: DirectoryLink) -> None:
        """Start without subscriptions."""
        self._link = link
        self._ears: dict[bytes, set[Ear]] = {}
        self._there: dict[bytes, anyio.Event] = {}
        self._unheard: dict[bytes, int] = {}
        self._made: AbstractConnection | None = None
        self._reader: asyncio.Task[None] | None = None
        self._opening = anyio.Lock()
        self._loop: object = None
        self._deaf = False

    def ear(self, channel: str) -> Ear:
        """Return a waiter on a channel, a context manager."""
        return Ear(self, channel.encode("utf-8", "surrogatepass"))

    def add(self, ear: Ear) -> None:
        """Wake this waiter at notices of its channel from now on."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # waiters of another loop cannot be woken from here or release its lock
            self._loop, self._ears, self._opening = loop, {}, anyio.Lock()
        self._ears.setdefault(ear.channel, set()).add(ear)

    def remove(self, ear: Ear) -> None:
        """Stop waking this waiter."""
        self._ears.get(ear.channel, set()).discard(ear)

    async def subscribe(self, channel: bytes) -> None:
        """Subscribe to a channel; return once that is confirmed, or after ``CONFIRM_S`` seconds."""
        if self._deaf:
            return
        if channel not in self._there or not self._hears():
            async with self._opening:
                if not self._hears():
                    await self._connect()
                if channel not in self._there:
                    assert self._made is not None  # noqa: S101 - it was just made
                    await self._made.send_command("SUBSCRIBE", channel, check_health=False)
                    self._there[channel] = anyio.Event()
        event = self._there.get(channel)
        if event is not None and not event.is_set():
            with anyio.move_on_after(CONFIRM_S):
                await event.wait()

    def _hears(self) -> bool:
        """Return whether the reader task runs on this loop."""
        reader = self._reader
        return reader is not None and not reader.done() and reader.get_loop() is asyncio.get_running_loop()

    async def _connect(self) -> None:
        self._there.clear()
        self._unheard.clear()
        self._made = await self._link.connection()
        self._reader = asyncio.create_task(self._read(self._made), name="asyncdp directory notices")

    async def _read(self, made: AbstractConnection) -> None:
        try:
            while True:
                message = await made.read_response(timeout=math.inf, disable_decoding=True, push_request=True)
                await self._take(message, made)
        except NoPermissionError:
            self._deaf = True
        except (RedisError, OSError):
            pass
        finally:
            await self._link.end(made)
            for event in self._there.values():  # no confirmation will arrive any more
                event.set()
            self.wake()

    async def _take(self, message: Any, made: AbstractConnection) -> None:
        kind, channel = message[0], message[1]
        if kind == b"subscribe":
            event = self._there.get(channel)
            if event is not None:
                event.set()
            return
        if kind != b"message":
            return
        ears = self._ears.get(channel)
        if ears:
            self._unheard[channel] = 0
            for ear in ears:
                ear.ring()
            return
        self._unheard[channel] = self._unheard.get(channel, 0) + 1
        if self._unheard[channel] > MOST_UNHEARD and channel in self._there:
            del self._there[channel]
            del self._unheard[channel]
            await made.send_command("UNSUBSCRIBE", channel, check_health=False)

    def wake(self) -> None:
        """Wake all waiters."""
        for ears in self._ears.values():
            for ear in ears:
                ear.ring()

    async def close(self) -> None:
        """Stop the reader task and wake all waiters."""
        hears, reader, made = self._hears(), self._reader, self._made
        self._reader = self._made = None
        if hears and reader is not None and made is not None:
            reader.cancel()
            await self._link.end(made)
        self.wake()


class Ear:
    """A waiter on one channel; it is registered while its context is entered."""

    __slots__ = ("_event", "_notices", "channel")

    def __init__(self, notices: Notices, channel: bytes) -> None:
        """Start without a notice."""
        self._notices = notices
        self._event = anyio.Event()
        self.channel = channel

    def __enter__(self) -> Self:
        self._notices.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._notices.remove(self)

    async def listen(self) -> None:
        """Subscribe to the channel; return once that is confirmed, or after ``CONFIRM_S`` seconds."""
        await self._notices.subscribe(self.channel)

    def clear(self) -> None:
        """Forget the notices received so far."""
        if self._event.is_set():
            self._event = anyio.Event()

    def ring(self) -> None:
        """Wake the waiter because of a change."""
        self._event.set()

    async def wait(self, seconds: float) -> None:
        """Return at the first notice since :meth:`clear`, or after ``seconds``."""
        with anyio.move_on_after(seconds):
            await self._event.wait()
