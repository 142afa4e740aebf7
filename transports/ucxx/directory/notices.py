"""Notices: the server says that something changed, so that who waits need not ask all the time."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any, Self

import anyio
from redis.exceptions import NoPermissionError, RedisError

if TYPE_CHECKING:
    from types import TracebackType

    from redis.asyncio.connection import AbstractConnection

    from .link import Link

__all__ = ["Ear", "Notices"]

#: Notices of a channel that nobody waits for, in a row, after which it is unsubscribed.
MOST_UNHEARD = 64
#: How long to wait for the confirmation of a subscription, in seconds; without it the waiter's own pauses have to do.
CONFIRM_S = 1.0


class Notices:
    """One connection on which the server tells of changes, opened when somebody first waits.

    A notice may be lost (the connection breaks): a waiter looks again by itself after a while. A user of the server who
    may not subscribe hears none at all, and his waiters do so always.

    Args:
        link: The way to the server.
    """

    def __init__(self, link: Link) -> None:
        """Hear nothing yet."""
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
        """Return a waiter on a channel, to be used in ``with``."""
        return Ear(self, channel.encode("utf-8", "surrogatepass"))

    def add(self, ear: Ear) -> None:
        """Wake this one from now on."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # who waited in a loop before cannot be woken from here, nor let go of a lock
            self._loop, self._ears, self._opening = loop, {}, anyio.Lock()
        self._ears.setdefault(ear.channel, set()).add(ear)

    def remove(self, ear: Ear) -> None:
        """Stop waking it."""
        self._ears.get(ear.channel, set()).discard(ear)

    async def subscribe(self, channel: bytes) -> None:
        """Return once the server will tell of changes; or after a while, if it cannot."""
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
        """Whether the reader runs, on this loop."""
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
            for event in self._there.values():  # nobody confirms any more
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
        """Wake everybody."""
        for ears in self._ears.values():
            for ear in ears:
                ear.ring()

    async def close(self) -> None:
        """End the reader and wake everybody."""
        hears, reader, made = self._hears(), self._reader, self._made
        self._reader = self._made = None
        if hears and reader is not None and made is not None:
            reader.cancel()
            await self._link.end(made)
        self.wake()


class Ear:
    """One waiter on one channel."""

    __slots__ = ("_event", "_notices", "channel")

    def __init__(self, notices: Notices, channel: bytes) -> None:
        """Hear nothing yet."""
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
        """Subscribe."""
        await self._notices.subscribe(self.channel)

    def clear(self) -> None:
        """Forget what was heard."""
        if self._event.is_set():
            self._event = anyio.Event()

    def ring(self) -> None:
        """Something changed."""
        self._event.set()

    async def wait(self, seconds: float) -> None:
        """Return when something changed since ``clear``, or after ``seconds``."""
        with anyio.move_on_after(seconds):
            await self._event.wait()
