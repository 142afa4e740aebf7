"""The host's side of one client connection: one request at a time until the stream ends or idles too long."""

from __future__ import annotations

import asyncio
import time
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import structlog
from msgspec.structs import replace

from asyncdp.errors import CorruptPayload, DataPlaneError, DataPlaneUnavailable

from ..slots.writer_process import Machine, Process, holds_socket, this_machine
from ..wire.chunks import send_messages
from ..wire.failures import describe
from ..wire.handshake import Secret, greet
from ..wire.messages import (
    Abort,
    Ask,
    Done,
    Drop,
    Failed,
    Granted,
    HostFacts,
    Message,
    More,
    Read,
    Ready,
    Reserve,
    Tie,
    Tied,
    Welcome,
    WireError,
    Write,
    Written,
    lease_id,
)
from .incoming import Incoming
from .limits.memory_share import SMALL_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..wire.control import Control
    from ..wire.engine import Engine, Operation
    from .limits.endpoint_tokens import Claims
    from .reads import ReadReply
    from .service import Service

__all__ = ["Session"]

#: Seconds that a peer has to receive a reply, plus one for each ``_TAKES_BYTES`` of it: 8 MiB/s, a tenth of a slow
#: network.
_TAKES_S: Final = 10.0
_TAKES_BYTES: Final = 8 << 20
#: Most bytes that a request takes once it is decoded, for each byte of its body: a list of names of one character each
#: takes 21 times its length, one of integers up to 14 times.
_DECODED: Final = 24
#: Most processes of clients that are remembered to have proved themselves.
_MOST_PROVED: Final = 4096
_RESERVE: Final = Reserve.__struct_config__.tag


class Session:
    """Serves the requests of one control stream.

    Args:
        control: The control stream.
        service: Executes the requests.
        engine, claims: UCX engine and tokens, for payload over UCX; None where the host has no UCX.
        secret: Shared secret that a client has to prove.
        ucx_port: TCP port number of the UCX listener; 0 without UCX.
    """

    def __init__(
        self,
        control: Control,
        service: Service,
        engine: Engine | None,
        claims: Claims | None,
        secret: Secret,
        ucx_port: int,
    ) -> None:
        """Initialise the state; :meth:`run` serves."""
        self.busy = False
        #: Called once the client has authenticated.
        self.on_greeted: Callable[[], object] = lambda: None
        self.control = control
        self._service = service
        self._engine = engine
        self._claims = claims
        self._secret = secret
        self._ucx_port = ucx_port
        self._endpoint: Any = None
        self._token = b""
        self._arrived: asyncio.Future[Any] | None = None
        self._client: Process | None = None
        self._owner = ""
        self._active_at = 0.0
        self._idle_timer: asyncio.TimerHandle

    def _log(self) -> Any:
        """Return the log; made where something is logged, since most connections of an attack log nothing."""
        return structlog.get_logger("asyncdp.ucxx").bind(peer=self.control.peer)

    async def run(self) -> None:
        """Authenticate the client and serve until the stream ends; errors are logged and not raised."""
        self.control.on_lost = self._abandon
        try:
            async with asyncio.timeout(self._service.settings.greeting_s):
                await self._greet()
            self.on_greeted()
            await self._serve()
        except DataPlaneError as err:  # the client was told, and may still read it
            self.control.close()
            self._log().debug("a connection ended", why=f"{type(err).__name__}: {err}")
        except (ConnectionResetError, WireError, TimeoutError) as err:
            self.end()
            self._log().debug("a connection ended", why=f"{type(err).__name__}: {err}")
        except Exception as err:  # noqa: BLE001 - no error of one peer may stop the host
            self.end()
            if type(err).__name__.startswith("UCXX"):
                self._log().debug("a UCX connection ended", why=f"{type(err).__name__}: {err}")
            else:
                self._log().exception("serving a connection failed")
        finally:
            self.busy = False
            self._abandon()
            self._service.table.revoke(holder=self)
            if self._claims is not None:
                self._claims.withdraw(self._token)
            self.control.close()

    def end(self) -> None:
        """Close the stream at once, as if the client had disconnected."""
        self.control.reset()

    def _abandon(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        arrived = self._arrived
        if endpoint is None and arrived is not None:
            if arrived.done() and not arrived.cancelled():
                endpoint, self._arrived = arrived.result(), None
            else:
                arrived.cancel()  # a waiting read would keep its whole reply in memory
        if endpoint is not None and self._engine is not None:
            self._engine.abandon(endpoint)

    async def _greet(self) -> None:
        answer = await greet(self.control, self._secret, self._welcome)
        # The death of a process that is invisible here (of another pid namespace, or hidden from this user) could not
        # be detected, so such a process may not copy into the arena itself.
        client = Process(answer.pid, answer.start)
        if Machine(answer.boot_id, answer.pid_namespace) == this_machine() and answer.pid and client.is_alive():
            self._client = client
        self._owner = blake2b(answer.client, digest_size=16).hexdigest()

    def _welcome(self) -> Welcome:
        """Return the welcome of a client that has authenticated, with a token for its UCX connection."""
        arena, settings = self._service.table.arena, self._service.settings
        self._token = b"\0" * 16
        if self._claims is not None:
            self._token, self._arrived = self._claims.give()
        return Welcome(
            b"\0" * 32,
            arena.host_id,
            arena.epoch,
            this_machine().boot_id,
            arena.name,
            self._ucx_port,
            self._token,
            settings.idle_s,
            settings.inline_bytes,
        )

    async def _writer(self) -> Process | None:
        """Return the client's process if it owns the socket of this connection, or of an earlier one; else None.

        The check takes a millisecond and is done at the first use. It is needed because slots reserved for a process
        stay reserved for as long as that process runs. Another connection of the same process is known by the random
        id that the client shows to nobody else.
        """
        client, proved = self._client, self._service.proved
        if client is not None and (self._owner, client) not in proved:
            if await asyncio.to_thread(holds_socket, client, self.control.peer_address):
                proved[self._owner, client] = None
                if len(proved) > _MOST_PROVED:
                    del proved[next(iter(proved))]
            else:
                self._client = None
        return self._client

    def _own(self, op_id: str) -> str:
        """Qualify an op_id by this client's private id, so that no other client can refer to the put."""
        return f"{self._owner}:{op_id}"

    async def _serve(self) -> None:
        async with asyncio.timeout(None) as scope:
            self._end_when_idle(scope)
            try:
                while not self._service.draining:
                    if self.control.pipelines:  # it did not await replies: all such peers share the long turns
                        await self._service.turns.next()
                    await self._serve_one()
            finally:
                self._idle_timer.cancel()

    def _end_when_idle(self, scope: asyncio.Timeout) -> None:
        """End the session after ``idle_s`` seconds without a request, or without the peer taking a reply.

        One timer looks now and then, since a timeout around each of both waits is a tenth of a small request.
        """
        loop = asyncio.get_running_loop()
        idle_s = self._service.settings.idle_s

        def look() -> None:
            left = self._active_at + idle_s - time.monotonic()
            if left > 0:
                self._idle_timer = loop.call_later(left, look)
            else:
                scope.reschedule(loop.time())

        self._active_at = time.monotonic()
        self._idle_timer = loop.call_later(idle_s, look)

    async def _serve_one(self) -> None:
        self._active_at = time.monotonic()
        nbytes = _DECODED * await self.control.arrival()
        self._active_at = time.monotonic()
        self.busy = True
        if nbytes <= SMALL_BYTES:
            await self._answer(self.control.take())
        else:
            service = self._service
            # Apart from the others, since what frees space must not wait for those that wait for space.
            share = service.reserving if self.control.kind == _RESERVE else service.requests
            async with share.hold(nbytes):
                if self.control.lost:
                    raise ConnectionResetError("the client is gone")
                await self._answer(self.control.take())
        self.busy = False

    async def _answer(self, request: Message) -> None:
        reply: Message | None
        try:
            reply = await self._handle(request)
        except DataPlaneError as err:
            reply = Failed(*describe(err))
        if reply is not None:
            await self.control.send(reply)

    async def _handle(self, request: Message) -> Message | None:  # noqa: PLR0911 - one branch per kind of request
        service = self._service
        if isinstance(request, Read):
            await self._read(request)
            return None
        if isinstance(request, Reserve):
            writer = await self._writer() if request.lane else None
            mine = replace(request, op_id=self._own(request.op_id))
            grants = await service.reserve(mine, writer, self._owner)
            told = [(grant.slot, grant.generation, grant.rows, grant.first_row) for grant in grants]
            return Granted(told, lane=writer is not None, leases=self._leases(request, writer))
        if isinstance(request, Write):
            return await self._write(replace(request, op_id=self._own(request.op_id)))
        if isinstance(request, Abort):
            return Done(await service.abort(replace(request, op_id=self._own(request.op_id)), await self._writer()))
        if isinstance(request, Drop):
            return Done(await service.drop(request))
        if isinstance(request, Tie):
            await self._tie()
            return Tied()
        if isinstance(request, Ask):
            return HostFacts(service.facts())
        raise WireError(f"{type(request).__name__} is no request")

    def _leases(self, request: Reserve, writer: Process | None) -> list[tuple[int, int]]:
        """Return slots for puts to come that were asked for; they are taken back when this session ends."""
        if writer is None or not request.ahead or self.control.lost:
            return []
        op_ids = [self._own(lease_id(request.op_id, number)) for number in range(request.ahead)]
        leases = self._service.lease(request, op_ids, writer, self._owner, self)
        return [(grant.slot, grant.generation) for grant in leases]

    async def _tie(self) -> None:
        if self._endpoint is not None:
            return
        if self._arrived is None:
            raise DataPlaneUnavailable("this host has no UCX, or the token was used already", blames_port=False)
        arrived = self._arrived
        try:
            async with asyncio.timeout(self._service.settings.greeting_s):
                self._endpoint = await asyncio.shield(arrived)
        except TimeoutError as err:
            raise DataPlaneUnavailable("the UCX connection did not arrive", cause=err) from err
        except asyncio.CancelledError:
            if not self.control.lost or (task := asyncio.current_task()) is None or task.cancelling():
                raise
            raise ConnectionResetError("the client is gone") from None
        self._arrived = None

    def _over_ucx(self) -> tuple[Engine, Any]:
        if self._engine is None or self._endpoint is None:
            raise WireError("payload over UCX without a UCX connection")
        return self._engine, self._endpoint

    async def _read(self, request: Read) -> None:
        in_frame = self._engine is None or not request.tag
        gone = lambda: self.control.lost  # noqa: E731
        reply = await self._service.read(request, in_frame=in_frame, stream=not in_frame, gone=gone)
        sent: list[Operation] = []
        try:
            if reply.nbytes <= SMALL_BYTES:
                await self._send(reply, request.tag, sent)
                return
            # The reply's memory counts towards the limit of all clients, so a slow peer may not hold it for long.
            async with asyncio.timeout(_TAKES_S + reply.nbytes / _TAKES_BYTES):
                await self._send(reply, request.tag, sent)
        finally:
            _when_ended(sent, reply.release)  # UCX may still read what a reply that was cut off has sent

    async def _send(self, reply: ReadReply, tag: int, sent: list[Operation]) -> None:
        await self.control.send(reply.rows)
        if reply.payloads or reply.gathers:
            if self._endpoint is None:  # the client connects UCX once it learns that it needs it
                tie = await self.control.expect(Tie)
                await self._answer(tie)
            engine, endpoint = self._over_ucx()
            work = self._service.turns.begin(lambda: self.control.lost)
            await send_messages(engine, endpoint, tag, reply.messages(self._service.buffers), sent, work)

    async def _write(self, request: Write) -> Message:
        service = self._service
        if service.is_written(request):
            return Written()
        if request.inline is not None:
            await service.write_inline(request)
            return Written()
        engine, endpoint = self._over_ucx()
        places = service.begin_write(request)
        incoming: Incoming | None = None
        corrupt: CorruptPayload | None = None

        async def verify(first: int, stop: int) -> None:
            nonlocal corrupt
            try:
                await service.verify(request, places, first, stop)
            except CorruptPayload as err:  # the client is told once it has sent all
                corrupt = corrupt or err

        try:
            tag = engine.next_tag()
            incoming = Incoming(engine, endpoint, tag, [data for _, data in places], service.buffers)
            await self.control.send(Ready(tag))
            await incoming.receive(lambda: self.control.send(More()), verify)
        except BaseException:
            # UCX may still be writing into the slots, so they are released only when its operations have ended.
            self._abandon()
            _when_ended([] if incoming is None else incoming.operations, lambda: service.release(places))
            raise
        if corrupt is not None:
            service.release(places)
            raise corrupt
        service.finish_write(places)
        return Written()


def _when_ended(operations: Sequence[Operation], then: Callable[[], object]) -> None:
    """Call ``then`` once all of these UCX operations have ended."""
    left = [operation for operation in operations if not operation.ended.done()]
    if not left:
        then()
        return
    waiting = len(left)

    def ended(_: object) -> None:
        nonlocal waiting
        waiting -= 1
        if not waiting:
            then()

    for operation in left:
        operation.ended.add_done_callback(ended)
