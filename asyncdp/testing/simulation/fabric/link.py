"""The link of one client to the simulated network: a layer between its stack and its transport."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from asyncdp.calls.slots import ClaimTry, ReadResult, ReadSlots
from asyncdp.errors import DataPlaneError, DataPlaneNotReady, StaleSlotError
from asyncdp.service import Layer

from ...faults.damage import damaged
from ...faults.fault import Chance, Delay, Fail, Fault, LoseReply, Send, Tamper, through
from ...faults.hits import fault_of
from ..recording.wire_request import SlotKey, WireRequest
from .network import CUT, RULES, PortState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncdp.calls import Call, CallContext, Sink
    from asyncdp.calls.slots import SlotRef
    from asyncdp.client import Client
    from asyncdp.service import Service

    from .fabric import Fabric

__all__ = ["NetworkLink", "Tap"]

R = TypeVar("R")

#: Host id of the directory in the simulated network.
DIRECTORY = "directory"
#: States of a port in which it does nothing that it is asked.
STOPS = (PortState.REFUSES, PortState.SILENT, PortState.RESETS)


def _key(ref: SlotRef) -> SlotKey:
    return ref.host.id, ref.host.epoch, ref.slot, ref.generation, ref.fields, tuple(ref.index)


def _subject(call: Any) -> object:
    """Return a value that distinguishes different requests of one user call."""
    host = getattr(call, "host", None)
    rows = getattr(call, "first_row", None)
    refs = tuple((ref.slot, ref.generation) for ref in getattr(call, "refs", ()))
    return None if host is None else host.id, rows, refs, getattr(call, "sample_ids", None)


class NetworkLink(Layer):
    """Delivers the requests of one client over the simulated network: late, twice, or not at all.

    A request in transit is not stopped when its sender gives up: it may arrive and be executed much later.

    Args:
        inner: Transport of the client.
        fabric: The fabric that it belongs to.
        name: Name of the client.
    """

    def __init__(self, inner: Service | Client, fabric: Fabric, name: str) -> None:
        """Start unpaused."""
        super().__init__(inner)
        self.fabric = fabric
        self.name = name
        #: (host, port) for which a probe was announced; None: no probe is expected.
        self.probing: tuple[Any, Any] | None = None
        #: Set when the client is resumed; None: it is not paused.
        self.asleep: anyio.Event | None = None

    # -- a client that is paused

    def pause(self) -> None:
        """Hold back all requests of the client and the replies to it."""
        if self.asleep is None:
            self.asleep = anyio.Event()

    def wake(self) -> None:
        """Release everything that was held back."""
        if self.asleep is not None:
            self.asleep.set()
            self.asleep = None

    # -- requests

    async def execute(self, call: Call[R], ctx: CallContext) -> R:
        """Send a request and record how it ended."""
        note = self._note(call, ctx)
        try:
            result = await self._send(call, ctx, note)
        except Exception as err:
            answer = isinstance(err, DataPlaneError) and (not err.retryable or isinstance(err, DataPlaneNotReady))
            note.ended, note.fault = type(err).__name__, not answer
            raise
        except BaseException:  # a cancel, or the timeout of the attempt
            note.ended, note.fault = "cancelled", True
            raise
        else:
            note.ended = "ok"
            if type(call) is ReadSlots:
                self._look(result, note)
            return result
        finally:
            note.done_at = self.fabric.clock.now()

    def _note(self, call: Any, ctx: CallContext) -> WireRequest:
        host = getattr(call, "host", None)
        port = getattr(call, "port", None)
        place = getattr(call, "host_id", None) if host is None else host.id  # a Probe goes to the host that it checks
        note = WireRequest(
            self.fabric.clock.now(), self.name, ctx.op_id, ctx.verb, type(call).__name__, place, port, ctx.attempt
        )
        if type(call) is ReadSlots:
            note.slots = tuple(map(_key, call.refs))
        else:
            note.subject = _subject(call)
        if self.probing is not None:
            note.probe = self.probing == (place, port)
            self.probing = None
        self.fabric.history.requests.append(note)
        return note

    @staticmethod
    def _look(result: Any, note: WireRequest) -> None:
        if result.errors:
            kinds = [(note.slots[at], err) for at, err in result.errors.items()]
            note.stale = tuple(key for key, err in kinds if isinstance(err, StaleSlotError))
            note.failed = tuple(key for key, err in kinds if isinstance(err, DataPlaneError) and err.retryable)

    async def _send(self, call: Call[R], ctx: CallContext, note: WireRequest) -> R:
        answer = await through(self._faults(call, note), call, ctx, self._arrive)
        if self.asleep is not None:
            await self.asleep.wait()
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    async def _arrive(self, call: Call[Any], ctx: CallContext) -> Any:
        """Execute a request; an error of the plane is returned, because it travels back as any other answer does."""
        try:
            return await self.inner.execute(call, ctx)
        except Exception as err:  # noqa: BLE001 - raised by _send()
            return err

    def _faults(self, call: Call[Any], note: WireRequest) -> list[Fault]:
        """Return what a request meets, the faults of its reply first, in the reverse order."""
        network = self.fabric.network
        host = DIRECTORY if note.host is None else note.host
        state = network.state(host, note.port)
        flight = network.latency_s(host, note.port)
        transit = Transit(self, flight)

        def slow(_: Any) -> bool:
            return flight > 2.0 * network.conditions.latency_s  # only slow requests have slow replies

        def lost(_: Any) -> bool:
            return network.happens("lost reply", network.conditions.lose_reply)

        def garbled(answer: Any) -> bool:
            what, p = "garbled payload", network.conditions.garble
            return isinstance(answer, ReadResult) and (
                network.count(what) if state is PortState.GARBLES else network.happens(what, p)
            )

        def cut_off(_: Any) -> bool:
            return (self.name, host) in network.cut and transit.stopped("unreachable")

        def never_sent(_: Any) -> bool:
            return network.strikes(network.conditions.lose_request) and transit.stopped("lost request")

        faults: list[Fault] = [
            Chance(Delay(flight), slow, reply=True),
            Chance(LoseReply(make=network.loss, after_s=flight), lost, reply=True),
            Chance(Tamper(change=partial(self._garbled, call)), garbled, reply=True),
        ]
        if state is PortState.MUTE:
            faults.append(Chance(fault_of(RULES[state]), lambda _: network.count("port mute"), reply=True))
        faults += [transit, Chance(fault_of(CUT), cut_off)]
        if state in STOPS:
            what = f"port {state.value}"
            faults.append(Chance(fault_of(RULES[state], after_s=flight), lambda _: transit.stopped(what)))
        return [*faults, Chance(Fail(make=network.loss, after_s=flight), never_sent), Delay(flight)]

    def _garbled(self, call: Any, answer: ReadResult) -> ReadResult:
        draw = self.fabric.network.rng.random()
        parts = [damaged(part, call, part.refs, "truncate", draw, schema=False) for part in answer.parts]
        return ReadResult(tuple(parts), answer.errors)


class Transit(Fault):
    """The way of a request to the plane: it may arrive after its sender gave up, or a second time.

    Args:
        link: Link of the sender.
        flight_s: Latency of the request in seconds.
    """

    def __init__(self, link: NetworkLink, flight_s: float) -> None:
        super().__init__()
        self.link = link
        self.flight_s = flight_s
        self._arrives = True  # whether it may still arrive after its sender has given up

    def stopped(self, what: str) -> bool:
        """Count a fault by which the request never arrives; return True."""
        self._arrives = False
        return self.link.fabric.network.count(what)

    async def strike(self, call: Any, ctx: Any, send: Send) -> Any:
        """Send the request once the client is awake."""
        fabric, network = self.link.fabric, self.link.fabric.network
        try:
            if self.link.asleep is not None:
                await self.link.asleep.wait()
            answer = await send(call, ctx)
        except BaseException:
            if self._arrives and network.happens("late request", network.conditions.arrives_late):
                fabric.deliver(self.link.inner, call, ctx, self.flight_s, self.link.asleep)
            raise
        # A claim attempt that found no samples is not duplicated, since the duplicate might claim some.
        found = not isinstance(answer, Exception) and (not isinstance(answer, ClaimTry) or answer.meta.size > 0)
        if found and network.happens("duplicate", network.conditions.duplicate):
            fabric.deliver(self.link.inner, call, ctx, 5.0 * self.flight_s, None)
        return answer


class Tap:
    """A sink of events that also records them, and announces probes to the link.

    Args:
        sink: The stack's own sink.
        link: Link of the client.
    """

    def __init__(self, sink: Sink, link: NetworkLink) -> None:
        """Store the sink and the link."""
        self.sink = sink
        self.link = link

    def emit(self, name: str, labels: Mapping[str, Any]) -> None:
        """Record the event and forward it to the stack's sink."""
        if name == "probe":
            self.link.probing = (labels.get("host"), labels.get("port"))
        self.link.fabric.record_event(self.link.name, name, labels)
        self.sink.emit(name, labels)
