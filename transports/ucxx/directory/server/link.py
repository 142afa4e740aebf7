"""Connections to the server, which are closed after a cancelled call, and the measurement of the server's clock."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import deque
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import anyio
from redis.asyncio import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, OutOfMemoryError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from asyncdp.errors import DataPlaneNotReady, DataPlaneUnavailable, DataPlaneUnsupported
from asyncdp.log_line import log_line
from asyncdp.process.forks import on_fork, on_fork_of_loop, replace_by_unconnected
from asyncdp.process.loop_end import abort, at_loop_end

from .. import lua as library
from .url import check_url

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from redis.asyncio.connection import AbstractConnection

    from ..settings import DirectorySettings

__all__ = ["DirectoryLink", "lines_of"]

NO_FUNCTION = "Function not found"
NO_COMMAND = "unknown command"
#: Most calls of a client that keep a connection while they do other work.
MOST_AT_ONCE: Final = 4
#: The only maxmemory-policy with which a full server refuses writes instead of evicting keys.
NO_EVICTION = "noeviction"


class DirectoryLink:
    """Sends commands to one server.

    redis-py's own retries are off, because they would silently execute a function twice whose reply was lost. A
    connection whose reply did not arrive is closed, so that no later call gets that reply. A command that could not be
    sent at all is ConnectionRefusedError; all other errors are redis-py's exceptions.

    Args:
        url: ``redis://``, ``rediss://`` (TLS) or ``unix://``; with user and password where the server requires them.
        settings: Configuration of the client.
        setting: Name of the setting that holds the URL, for errors.
        now: Monotonic clock in seconds; replaced in tests.

    Raises:
        ValueError: The URL is invalid.
    """

    def __init__(
        self,
        url: str,
        settings: DirectorySettings,
        *,
        setting: str = "controller_address",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep the settings; the first command connects."""
        self._settings = settings
        self._version = library.version(settings.namespace)
        self.now = now
        # No socket_timeout: the caller bounds each call, and redis-py would implement it by asyncio.wait_for.
        check_url(url, setting)
        self._maker = ConnectionPool.from_url(
            url,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=None,
            socket_connect_timeout=settings.connect_timeout_s,
            health_check_interval=0,
            driver_info=None,  # it would send two commands per connection that a plane's user may not send
        )
        self._idle: deque[tuple[float, AbstractConnection]] = deque()
        self._transports: WeakKeyDictionary[AbstractConnection, Any] = WeakKeyDictionary()
        self._places = anyio.Semaphore(settings.max_connections, fast_acquire=True)
        self._at_once = anyio.Semaphore(MOST_AT_ONCE, fast_acquire=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: AsyncGenerator[None, None] | None = None
        self._closed = False
        self._offset_s = 0.0
        self._synced_at: float | None = None
        self._evicting: str | None = None
        self._supervised = False
        self._missed_at: float | None = None
        self._syncing = anyio.Lock()
        self.epoch = ""
        on_fork(self)

    # -- connections

    def _bind_loop(self) -> None:
        """Reset the state where the running loop is a new one: connections and locks of another loop are unusable."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        self._leave()
        self._loop = loop
        self._end = at_loop_end(partial(_end_all, self._idle, self._transports))
        # A task of a loop that was closed before the task ended never releases these.
        self._places = anyio.Semaphore(self._settings.max_connections, fast_acquire=True)
        self._at_once = anyio.Semaphore(MOST_AT_ONCE, fast_acquire=True)
        self._syncing = anyio.Lock()
        on_fork_of_loop(loop)

    @property
    def at_once(self) -> anyio.Semaphore:
        """Places of calls that keep a connection while they do other work."""
        self._bind_loop()
        return self._at_once

    def _leave(self) -> None:
        """Close the connections of the previous loop, which was closed without cleanup or is not the running one."""
        left, loop = list(self._transports.items()), self._loop
        self._idle, self._transports, self._end, self._loop = deque(), WeakKeyDictionary(), None, None
        if not left or loop is None:
            return
        if loop.is_closed():
            _end_now(left)
        else:
            loop.call_soon_threadsafe(_end_now, left)

    def after_fork(self) -> None:
        """Close the parent's connections in a forked child."""
        for transport in list(self._transports.values()):
            sock = transport.get_extra_info("socket")
            if sock is not None:
                replace_by_unconnected(sock.fileno())

    async def connection(self) -> AbstractConnection:
        """Return a connection for exclusive use; the caller passes it to :meth:`keep` or :meth:`end` afterwards."""
        self._bind_loop()
        while self._idle:
            since, made = self._idle.pop()
            if await self._usable(made, since):
                return made
        made = self._maker.make_connection()
        done = False
        try:
            with anyio.fail_after(self._settings.connect_timeout_s):
                await made.connect()
            self._transports[made] = made._writer.transport  # noqa: SLF001 - after a cancel redis-py has dropped it
            done = True
            self._missed_at = None
        except (RedisError, OSError) as err:
            if self._missed_at is None:
                self._missed_at = self.now()
            told = err.__cause__ if isinstance(err.__cause__, RedisError) else err
            if isinstance(told, RedisError) and type(told) not in (RedisConnectionError, RedisTimeoutError):
                raise told from None  # a wrong password or a loading server, which says more than "refused"
            msg = f"the directory cannot be reached: {err or 'no answer to the greeting'}"
            raise ConnectionRefusedError(msg) from err
        finally:
            if not done:
                await self.end(made)
        return made

    async def _usable(self, made: AbstractConnection, since: float) -> bool:
        """Return whether an idle connection is still open; the server may have closed it or have restarted."""
        if not made.is_connected:
            return False
        if self.now() - since < self._settings.check_idle_s:
            return True
        try:
            if not await made.can_read():
                return True
        except (RedisConnectionError, OSError):
            pass
        await self.end(made)
        return False

    async def end(self, made: AbstractConnection) -> None:
        """Close a connection at once; redis-py's own method keeps one with TLS open until its peer closes it too."""
        transport = self._transports.pop(made, None)
        if transport is not None:
            abort(transport)
        await made.disconnect(nowait=True)

    def keep(self, made: AbstractConnection) -> None:
        """Return a connection whose replies were all read to the idle ones."""
        if not self._closed and made.is_connected:
            self._idle.append((self.now(), made))

    # -- commands

    async def pipeline(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send commands in one round trip; return the server's errors as values."""
        async with self.asked(commands) as replies:
            return await replies()

    @asynccontextmanager
    async def asked(self, commands: Sequence[Sequence[Any]]) -> AsyncIterator[Callable[[], Awaitable[list[Any]]]]:
        """Send commands; their replies can be awaited within the context, once, as :meth:`pipeline` returns them."""
        self._bind_loop()
        async with self._places:
            made = await self.connection()
            replies: list[Any] = []

            async def read() -> list[Any]:
                for _ in commands:
                    try:
                        replies.append(await made.read_response(disable_decoding=True))
                    except ResponseError as err:
                        replies.append(err)
                return replies

            try:
                await made.send_packed_command(made.pack_commands(commands), check_health=False)
                yield read
            except (RedisConnectionError, RedisTimeoutError):
                self._synced_at = None  # the next connection may be to another server
                await self.end(made)
                raise
            except BaseException:
                await self.end(made)
                raise
            if self._closed or len(replies) < len(commands):
                await self.end(made)
            if any(isinstance(reply, ReadOnlyError) for reply in replies):
                # The server became a replica, and another one may have its name or address now: reconnect.
                self._synced_at = None
                await self.end(made)
            self.keep(made)

    async def command(self, *args: Any) -> Any:
        """Send one command; return its reply, or raise the server's error."""
        (reply,) = await self.pipeline([args])
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def functions(self, calls: Sequence[tuple[str, str, Sequence[Any]]]) -> list[Any]:
        """Call functions of the library, (verb, key, arguments) each; load the library where it is missing."""
        commands = [self.call_of(verb, key, *args) for verb, key, args in calls]
        replies = await self.pipeline(commands)
        if any(isinstance(reply, ResponseError) and NO_FUNCTION in str(reply) for reply in replies):
            await self.load()
            missing = [at for at, reply in enumerate(replies) if isinstance(reply, ResponseError)]
            for at, reply in zip(missing, await self.pipeline([commands[at] for at in missing]), strict=True):
                replies[at] = reply
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply if NO_COMMAND not in str(reply) else await self._too_old()
        return replies

    def call_of(self, verb: str, key: str, *args: Any) -> tuple[Any, ...]:
        """Return the command that calls a function of the library."""
        return ("FCALL", f"{verb}_{self._version}", 1, key, *args)

    async def function(self, verb: str, key: str, *args: Any) -> Any:
        """Call one function of the library."""
        (reply,) = await self.functions([(verb, key, args)])
        return reply

    async def load(self) -> None:
        """Load the plane's functions into the server unless they are loaded."""
        namespace = self._settings.namespace
        try:
            await self.command("FUNCTION", "LOAD", library.source(namespace))
        except NoPermissionError as err:
            msg = (
                f"the directory at {self._place} has no functions of this version for the namespace {namespace!r}, and"
                " this user may not load them: an administrator of the server runs, with a URL of their own in"
                f" ASYNCDP_DIRECTORY, asyncdp directory install --namespace {namespace}"
            )
            raise DataPlaneUnavailable(msg, retryable=False, blames_port=False) from err
        except OutOfMemoryError as err:
            msg = (
                f"the directory at {self._place} is out of memory, and has no functions of this version for the"
                f" namespace {namespace!r} with which rows could be removed: raise its maxmemory until they are loaded"
                " (CONFIG SET maxmemory, then any call, or asyncdp directory install), or remove rows with a client of"
                " the version that wrote them"
            )
            raise DataPlaneNotReady(msg, retry_after_s=0.5) from err
        except ResponseError as err:
            if NO_COMMAND in str(err):
                raise await self._too_old() from err
            if "already exists" not in str(err):  # another client has loaded it meanwhile
                raise

    async def _too_old(self) -> DataPlaneUnsupported:
        """Return the error of a server without support for functions, with its name and version."""
        name = "the server"
        with contextlib.suppress(ResponseError):
            told = lines_of(await self.command("INFO", "server"))
            name = f"Valkey {told['valkey_version']}" if "valkey_version" in told else f"Redis {told['redis_version']}"
        msg = f"the directory at {self._place} cannot be used: {name} knows no functions; Redis 7 or Valkey is needed"
        return DataPlaneUnsupported(msg, capability="functions")

    @property
    def is_local(self) -> bool:
        """Whether the connection uses a unix socket."""
        return "path" in self._maker.connection_kwargs

    @property
    def _place(self) -> str:
        """Address of the server, without user and password, for messages."""
        told = self._maker.connection_kwargs
        return str(told.get("path") or f"{told.get('host', 'localhost')}:{told.get('port', 6379)}")

    # -- the server

    async def ready(self) -> None:
        """Measure the server's clock and read the plane's id, unless that was done within ``sync_clock_s``."""
        if self._fresh():
            return
        self._bind_loop()
        async with self._syncing:
            if not self._fresh():
                await self._sync()

    def _fresh(self) -> bool:
        return self._synced_at is not None and self.now() - self._synced_at < self._settings.sync_clock_s

    async def _sync(self) -> None:
        key, kept = f"{self._settings.namespace}:plane", f"{self._settings.namespace}:format"
        asked = [("GET", key), ("GET", kept), ("INFO", "memory"), ("GET", self._supervision)]
        epoch, version, memory, supervised = await self.pipeline(asked)
        if epoch is None:
            # The format first: a plane without one is of the release that stored none.
            made = [("SET", kept, library.FORMAT, "NX"), ("SET", key, uuid.uuid4().hex, "NX")]
            _, refused, epoch, version = await self.pipeline([*made, ("GET", key), ("GET", kept)])
            if epoch is None:
                msg = f"the directory at {self._place} was emptied while it was opened"
                epoch = refused if isinstance(refused, Exception) else DataPlaneUnavailable(msg)
        elif version is None and await self.command("GET", key) == epoch:  # else it was emptied in between
            version = b"1"
        sent = self.now()  # the connection exists already, so only the round trip is measured
        clock = await self.command("TIME")
        came = self.now()
        for reply in (epoch, version):
            if isinstance(reply, Exception):
                raise reply
        if version not in (None, str(library.FORMAT).encode()):  # None: it was emptied, or is full
            msg = (
                f"the directory at {self._place} holds a plane of data format {version.decode(errors='replace')}, this "
                f"asyncdp reads {library.FORMAT}: use the release that wrote it, or another namespace"
            )
            raise DataPlaneUnavailable(msg, retryable=False, blames_port=False)
        if not isinstance(memory, Exception):  # otherwise this user may not send INFO
            self._look_at_eviction(lines_of(memory))
        self._offset_s = int(clock[0]) + int(clock[1]) / 1e6 - (sent + came) / 2
        self.epoch = epoch.decode()
        self._supervised = supervised == b"1"
        self._synced_at = came

    def _look_at_eviction(self, memory: Mapping[str, str]) -> None:
        """Refuse to open a directory that evicts keys when it is full; log an error where an open one starts to.

        Raises:
            DataPlaneUnsupported: The server may evict rows, claims and outcomes of mutations without an error.
        """
        policy = memory.get("maxmemory_policy", NO_EVICTION)
        evicting = policy if policy != NO_EVICTION and memory.get("maxmemory", "0") != "0" else None
        if evicting is not None and not self.epoch:
            msg = (
                f"the directory at {self._place} has maxmemory-policy {policy}: when it is full it removes rows, claims"
                f" and outcomes without a word; set maxmemory-policy {NO_EVICTION}"
            )
            raise DataPlaneUnsupported(msg, capability=NO_EVICTION)
        if evicting is not None and evicting != self._evicting:
            log_line(
                "error",
                "the directory may remove rows, claims and outcomes without a word: its maxmemory-policy was changed",
                directory=self._place, maxmemory_policy=policy, set_it_to=NO_EVICTION,
            )  # fmt: skip
        self._evicting = evicting

    @property
    def _supervision(self) -> str:
        return f"{self._settings.namespace}:supervised"

    async def tell_supervised(self, *, supervised: bool) -> None:
        """Record in the server whether a supervisor restarts it when it dies."""
        await self.command("SET", self._supervision, "1" if supervised else "0")

    @property
    def expected(self) -> bool:
        """Whether a server that does not answer is expected back.

        It is if it has answered before, and either is supervised or was first missed at most ``directory_timeout_s``
        ago.
        """
        if not self.epoch:
            return False
        missed_s = 0.0 if self._missed_at is None else self.now() - self._missed_at
        return self._supervised or missed_s <= self._settings.directory_timeout_s

    async def forget(self) -> str:
        """Read the plane's id again and return it; a server that was restarted without its data has another one."""
        self._synced_at = None
        await self.ready()
        return self.epoch

    def server_us(self, ahead_s: float) -> int:
        """Return the server's clock ``ahead_s`` seconds from now, in microseconds."""
        return int((self.now() + self._offset_s + min(ahead_s, 1e9)) * 1e6)

    async def close(self) -> None:
        """Close idle connections; a connection in use is closed when its call ends."""
        self._closed = True
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            self._leave()
        while self._idle:
            _, made = self._idle.pop()
            await self.end(made)
        if self._end is not None and not self._transports:
            end, self._end, self._loop = self._end, None, None
            await end.aclose()


async def _end_all(idle: deque[Any], transports: WeakKeyDictionary[AbstractConnection, Any]) -> None:
    """Close all connections at the end of their loop, after the tasks that use them were cancelled."""
    left = list(transports.items())
    idle.clear()
    transports.clear()
    _end_now(left)
    await asyncio.sleep(0)  # one iteration of the loop, in which asyncio closes the sockets


def _end_now(connections: list[tuple[AbstractConnection, Any]]) -> None:
    """Close connections at once, so that redis-py does not warn when they are garbage collected."""
    for made, transport in connections:
        abort(transport)
        made._reader = made._writer = None  # noqa: SLF001 - as its disconnect() does, which is a coroutine


def lines_of(info: bytes) -> dict[str, str]:
    """Parse the reply of INFO into a dict."""
    return dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
