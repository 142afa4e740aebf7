"""A slot host: an arena, N ports, heartbeats. ``python -m asyncdp.transports.ucxx.host.main`` runs one."""

from __future__ import annotations

import asyncio
import contextlib
import math
import runpy
import time
from typing import TYPE_CHECKING, Any, Final

import structlog

from asyncdp.errors import DataPlaneError, DataPlaneUnavailable
from asyncdp.process.buffer_pool import BufferPool

from ..slots.arena import Arena, arena_name, sweep_arenas
from ..slots.header import State
from ..slots.table import SlotTable
from ..slots.writer_process import this_machine
from ..wire.control import LARGE_BYTES
from ..wire.engine import Engine
from ..wire.handshake import Secret
from .advertised_address import advertised_address
from .limits.endpoint_tokens import Claims
from .limits.eviction import source_of, to_evict
from .limits.pending_connections import PendingConnections
from .port import Port, open_ports
from .recovery import recover_slots
from .registration import HostDirectory, HostReport, NoDirectory
from .service import Service
from .session import Session
from .ucx_watchdog import Action, DescriptorLeakDetector, Escalation, SpinDetector, most_sessions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from ..wire.control import Control
    from .settings import HostSettings

__all__ = ["Host"]

#: Seconds for which the host remembers aborted puts, to refuse late requests of them; longer than any put may take.
_REFUSALS_S: Final = 3600.0
#: Seconds after which unused reply buffers are returned to the system; a burst may have allocated many of them.
_IDLE_S: Final = 5.0
#: Most unauthenticated connections at a time; beyond that one is closed for each new one.
_GREETED_AT_ONCE: Final = 96
#: Most bytes of requests over 1 MiB, of all clients together, that have come in part or were not taken; an honest one
#: is whole within some milliseconds, and no other follows it before the reply.
_INCOMING_BYTES: Final = 256 << 20
#: Seconds before a background task of the host that failed is started again.
_AGAIN_S: Final = 1.0
#: Seconds between two log lines about the progress of draining.
TELL_S: Final = 0.5


class Host:
    """A slot host in this process and on its running loop.

    Args:
        settings: Configuration of the host.
        directory: Directory that the host registers with; None: it is not registered, and unpublished slots are never
            reclaimed.
        secret: Shared secret that clients have to prove; None: from the environment, else from the directory.
        anew_from: Monotonic time from which the host may request a restart of its process; infinity: never.

    Attributes:
        ended: Set when the host has to stop: it was told to, another incarnation of it has registered, or it is spoilt.
        spoilt: Whether only a new process helps, because UCX cannot be freed of what misbehaving peers left in it. The
            arena is then kept for that process.
    """

    def __init__(
        self,
        settings: HostSettings,
        directory: HostDirectory | None = None,
        secret: Secret | None = None,
        *,
        anew_from: float = math.inf,
    ) -> None:
        """Initialise the state; :meth:`start` starts serving."""
        self.settings = settings
        self.spoilt = False
        #: Whether the arena is that of a previous incarnation, and this one has not registered yet.
        self._not_ours_yet = False
        self._most_sessions = most_sessions()
        self._anew_from = anew_from if settings.adopt else math.inf
        self.ended = asyncio.Event()
        self._cut_off = False
        self._reconciles = directory is not None
        self._directory: HostDirectory = NoDirectory() if directory is None else directory
        self._secret = Secret() if secret is None else secret
        self._engine: Engine | None = None
        self._claims: Claims | None = None
        self._ucx_port = 0
        self._pending_connections = PendingConnections(settings.greeting_s)
        self._ports: list[Port] = []
        self._sessions: dict[asyncio.Task[None], Session] = {}
        #: Those that have not authenticated, and their sources.
        self._strangers: dict[Session, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._ahead_s = time.time() - time.monotonic()
        self._address = settings.publish or settings.bind
        self._log = structlog.get_logger("asyncdp.ucxx").bind(host=settings.host_id)
        self.arena: Arena
        self.service: Service

    # -- start

    async def start(self) -> HostReport:
        """Adopt or create the arena, listen and register. Returns the report that was registered.

        Raises:
            DataPlaneUnavailable: There is too little shared memory or no free port, no address at which clients could
                reach the host, or a host of this name is running already.
        """
        settings = self.settings
        self._address = advertised_address(settings.bind, settings.publish)
        if not self._secret:
            self._secret = Secret(await self._directory.shared_secret() or "")
        for name in sweep_arenas(settings.sweep_arenas_s):
            self._log.info("removed the arena of a host that never came back", arena=name)
        self.arena = await self._take_arena()
        try:
            await self._listen()
            report = self.report()
            await self._beat(report)
        except BaseException:
            await self.stop()
            raise
        self._not_ours_yet = False
        self._keep(lambda: self._every(settings.beat_s, lambda: self._beat(self.report())))
        self._keep(lambda: self._every(1.0, self._sweep))
        if settings.ucx and settings.watch_ucx_s:
            self._keep(self._watch_ucx)
        if self._reconciles:
            self._keep(lambda: self._every(settings.grace_s / 2, self.reconcile))
            self._keep(lambda: self._every(settings.reap_s, self._reap))
        return report

    def _keep(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a background task for as long as the host serves; where it fails, log the error and restart it."""
        self._tasks.append(asyncio.create_task(self._kept(work)))

    async def _kept(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                return await work()
            except Exception:  # noqa: BLE001 - without heartbeats clients would give the host up
                with contextlib.suppress(Exception):
                    self._log.exception("a background task of the host failed; it is started again")
            await asyncio.sleep(_AGAIN_S)

    async def _take_arena(self) -> Arena:
        """Adopt the arena of the previous incarnation, or create a new one, and create the service on it."""
        settings = self.settings
        name = arena_name(settings.host_id, settings.plane)
        arena = Arena.recover(name, settings.host_id) if settings.adopt else None
        adopted = self._not_ours_yet = arena is not None
        if arena is not None and arena.units != max(1, settings.arena_bytes // settings.unit_bytes):
            self._log.warning(
                "the adopted arena keeps its size; without adoption it would be another", units=arena.units
            )
        if arena is None:
            Arena.discard(name)
            epoch = await self._directory.next_epoch(settings.host_id)
            arena = Arena.create(
                name,
                settings.host_id,
                epoch=epoch,
                data_bytes=settings.arena_bytes,
                unit_bytes=settings.unit_bytes,
            )
        table = SlotTable(
            arena,
            max_slot_bytes=settings.max_slot_bytes,
            rows_per_slot=settings.rows_per_slot,
            overwrite_oldest=settings.on_full == "overwrite_oldest",
            on_free=lambda: self.service.space_came_back(),  # noqa: PLW0108 - the service is created below
        )
        self.service = Service(table, settings, self._directory, BufferPool(), self.clock)
        if adopted:
            recover_slots(table)
        return arena

    async def _listen(self) -> None:
        settings = self.settings
        if settings.ucx:
            self._start_ucx()
        self._ports = await open_ports(
            settings.bind, settings.first_port, settings.ports, self._pending_connections, self._serve
        )

    def _start_ucx(self) -> None:
        self._engine = Engine(devices=self.settings.devices)
        self._claims = Claims(self._engine, self.settings.greeting_s)
        self._ucx_port = self._engine.listen(self._claims.accept, drop=True)

    async def _restart_ucx(self) -> None:
        """Replace the UCX worker and listener by new ones and end all sessions; clients reconnect."""
        engine, claims = self._engine, self._claims
        self._start_ucx()
        for session in list(self._sessions.values()):
            session.end()
        if claims is not None:
            await claims.close()
        if engine is not None:
            await engine.close()

    async def _watch_ucx(self) -> None:
        """Restart UCX where its unauthenticated listener was misused; that closes the leaked descriptors."""
        seconds, spin, descriptors, posted = self.settings.watch_ucx_s, SpinDetector(), DescriptorLeakDetector(), 0
        escalation, action = Escalation(seconds, self._anew_from), Action.NEW_WORKER
        while True:
            await asyncio.sleep(seconds)
            engine = self._engine
            idle = engine is not None and not engine.under_way and engine.posted == posted
            posted = 0 if engine is None else engine.posted
            why = "its thread spins: it got garbage" if spin.look(seconds, idle=idle) else ""
            if not why and descriptors.look(len(self._sessions)):
                why = "strangers hold descriptors"
            if not why:
                continue
            before, action = action, escalation.next(time.monotonic())
            if action is not Action.NOTHING or before is not action:
                self._log.warning("strangers misuse the UCX listener", why=why, therefore=action.value)
            if action is Action.NEW_WORKER:
                await self._restart_ucx()
                spin, posted = SpinDetector(), 0
            elif action is Action.NEW_PROCESS:
                self.spoilt = True
                self.ended.set()
                return

    def _serve(self, control: Control) -> None:
        if len(self._strangers) >= _GREETED_AT_ONCE:
            evicted = to_evict(self._strangers)
            del self._strangers[evicted]
            evicted.end()
        elif len(self._sessions) >= self._most_sessions:
            self._log.warning("a connection is refused: the descriptor limit of this process allows no more")
            control.end()
            return
        control.on_large = self._bound_incoming
        session = Session(control, self.service, self._engine, self._claims, self._secret, self._ucx_port)
        session.on_greeted = lambda: self._strangers.pop(session, None)
        task = asyncio.get_running_loop().create_task(session.run())
        self._sessions[task] = session
        self._strangers[session] = source_of(control.peer)

        def ended(task: asyncio.Task[None]) -> None:
            self._sessions.pop(task, None)
            self._strangers.pop(session, None)

        task.add_done_callback(ended)

    def _bound_incoming(self) -> None:
        """End the connections whose long requests began first, where all that were not taken take too much memory."""
        long = [session for session in self._sessions.values() if session.control.kept_bytes > LARGE_BYTES]
        long.sort(key=lambda session: session.control.kept_since, reverse=True)
        total = sum(session.control.kept_bytes for session in long)
        while total > _INCOMING_BYTES and long:
            oldest = long.pop()
            total -= oldest.control.kept_bytes
            self._log.warning("requests that are not served yet take too much memory: the oldest is closed")
            oldest.end()

    # -- reports

    def clock(self) -> float:
        """Return unix seconds by the directory's clock; this machine's clock may be adjusted between two heartbeats."""
        return time.monotonic() + self._ahead_s

    def report(self) -> HostReport:
        """Return what the next heartbeat reports."""
        table = self.service.table
        return HostReport(
            self.arena.host_id,
            self.arena.epoch,
            self._address,
            tuple(port.number for port in self._ports),
            table.free_bytes,
            float(self.arena.units * self.arena.unit_bytes - table.free_bytes),
            this_machine().boot_id,
            self.arena.name,
            self.service.draining,
            self.settings.supervised,
            table.states(),
        )

    # -- periodic work

    async def _every(self, seconds: float, work: Callable[[], Awaitable[object]]) -> None:
        failing = False
        while True:
            await asyncio.sleep(seconds)
            try:
                await work()
                if failing:
                    self._log.info("the directory can be used again")
                failing = False
            except DataPlaneError as err:
                if not failing:
                    self._log.warning("the directory cannot be used; serving goes on", why=str(err))
                failing = True
                if not err.retryable and isinstance(err, DataPlaneUnavailable):
                    self._log.error("this host was replaced and ends", why=str(err))
                    self.ended.set()
            except Exception:  # noqa: BLE001 - the next heartbeat or sweep may succeed
                self._log.exception("a host's own work failed; serving goes on")

    async def _beat(self, report: HostReport) -> None:
        self.arena.mark_alive()
        before = time.monotonic()
        told = await self._directory.beat(report)
        self._ahead_s = told - (before + time.monotonic()) / 2

    async def _reap(self) -> None:
        for name in await self._directory.reap():
            self._log.info("removed a host that sent no heartbeat for long from the directory", silent=name)

    async def _sweep(self) -> None:
        self.service.buffers.trim(_IDLE_S)
        await self.service.sweep()
        self.service.table.forget(self.clock() - _REFUSALS_S)

    async def reconcile(self) -> int:
        """Free rows that the directory does not list: never published, or cleared while this host was unreachable.

        It considers only slots that have been READY for longer than any put may take, by the directory's clock. Returns
        the number of slots of which rows were freed.
        """
        table, latest = self.service.table, self.clock() - self.settings.grace_s
        old, work = [], self.service.turns.begin()
        for slot in list(table.slots.values()):
            if work.over:
                await work.next()
            if (
                table.find(slot.number, slot.generation) is slot
                and table.apply_outcome(slot) is State.READY
                and slot.ready_since < latest
                and slot.header.not_after < latest
            ):
                old.append((slot.number, slot.generation))
        if not old:
            return 0
        live = await self._directory.live(self.arena.host_id, self.arena.epoch)
        touched = 0
        for place in old:
            if work.over:
                await work.next()
            found = table.find(*place)
            if found is not None:
                dead = set(range(found.header.rows)).difference(live.get(place, ()))
                if found.any_live(self.arena, dead):
                    table.drop(*place, sorted(dead))
                    touched += 1
        if touched:
            self._log.info("freed rows to which no sample refers", slots=touched)
        return touched

    # -- end

    def fail_port(self, index: int) -> None:
        """Close a port and its connections but keep it registered, as after a fault. For tests of clients."""
        self._ports[index].fail()
        self._log.warning("a port was closed on request", port=self._ports[index].number)

    def cut_off_requests(self) -> None:
        """Make :meth:`stop` cut off running requests instead of waiting for them."""
        self._cut_off = True

    async def stop(self) -> None:
        """Accept nothing more, let running requests finish for at most ``drain_s``, then close everything.

        The order avoids crashes of UCX: finish reads, abort connections, wait until UCX is done with all buffers, stop
        the engine, then close or unlink the arena.
        """
        began = time.monotonic()
        for port in self._ports:
            port.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if hasattr(self, "service"):
            self.service.draining = True
            await self._drain()
        if self._claims is not None:
            await self._claims.close()
        if self._engine is not None:
            await self._engine.close()
        if hasattr(self, "arena"):
            # A start that failed, for instance since the directory did not answer, leaves adopted rows to the next one.
            if not self._not_ours_yet:
                with contextlib.suppress(DataPlaneError, TimeoutError):
                    async with asyncio.timeout(1.0):
                        await self._directory.leave(self.arena.host_id, self.arena.epoch)
            if self.settings.adopt and (self.settings.keep_arena or self.spoilt or self._not_ours_yet):
                self.arena.close()
            elif not self.arena.given_up:
                self.arena.unlink()
        self._log.info("stopped", seconds=round(time.monotonic() - began, 3))

    async def _drain(self) -> None:
        """Wait for at most ``drain_s`` until no session is answering a request, then end all sessions."""
        until = time.monotonic() + self.settings.drain_s
        told_at = 0.0
        while busy := sum(session.busy for session in self._sessions.values()):
            left = until - time.monotonic()
            if left <= 0 or self._cut_off:
                self._log.warning("requests are cut off", requests=busy)
                break
            if time.monotonic() - told_at >= TELL_S:
                told_at = time.monotonic()
                self._log.info("draining", requests=busy, for_at_most_s=round(left, 1))
            await asyncio.sleep(0.02)
        for task in list(self._sessions):
            task.cancel()
        await asyncio.gather(*self._sessions, return_exceptions=True)


if __name__ == "__main__":  # the command's former name, kept for one version
    runpy.run_module("asyncdp.transports.ucxx.host.main", run_name="__main__")
