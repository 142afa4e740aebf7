"""The link of one client to the simulated network: a layer between its stack and its transport."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from asyncdp.calls.slots import ClaimTry, ReadResult, ReadSlots
from asyncdp.errors import DataPlaneError, DataPlaneNotReady, StaleSlotError
from asyncdp.service import Layer

from ..faults.damage import damaged
from .network import DoorState
from .wire_request import SlotKey, WireRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncdp.calls import Call, CallContext, Sink
    from asyncdp.calls.slots import SlotRef
    from asyncdp.client import Client
    from asyncdp.service import Service

    from .fabric import Fabric

__all__ = ["Link", "Tap"]

R = TypeVar("R")

#: Host id of the directory in the simulated network.
DIRECTORY = "directory"


def _key(ref: SlotRef) -> SlotKey:
    return ref.host.id, ref.host.epoch, ref.slot, ref.generation, ref.fields, tuple(ref.index)


def _subject(call: Any) -> object:
    """Return a value that distinguishes different requests of one user call."""
    host = getattr(call, "host", None)
    rows = getattr(call, "first_row", None)
    refs = tuple((ref.slot, ref.generation) for ref in getattr(call, "refs", ()))
    return None if host is None else host.id, rows, refs, getattr(call, "sample_ids", None)


class Link(Layer):
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
        self._asleep: anyio.Event | None = None

    # -- a client that is paused

    def pause(self) -> None:
        """Hold back all requests of the client and the replies to it."""
        if self._asleep is None:
            self._asleep = anyio.Event()

    def wake(self) -> None:
        """Release everything that was held back."""
        if self._asleep is not None:
            self._asleep.set()
            self._asleep = None

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
        network = self.fabric.network
        host = DIRECTORY if note.host is None else note.host
        state = network.state(host, note.port)
        flight = network.latency_s(host, note.port)
        answer = await self._there(call, ctx, host, state, flight)
        if state is DoorState.MUTE:
            network.faults["door mute"] += 1
            await anyio.sleep_forever()
        if isinstance(answer, ReadResult) and (
            state is DoorState.GARBLES or network.strikes(network.conditions.garble)
        ):
            network.faults["garbled payload"] += 1
            answer = self._garbled(answer, call)
        if network.strikes(network.conditions.lose_reply):
            network.faults["lost reply"] += 1
            await self._lose(flight)
        if flight > 2.0 * network.conditions.latency_s:  # only slow requests have slow replies
            await anyio.sleep(flight)
        if self._asleep is not None:
            await self._asleep.wait()
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    async def _there(self, call: Call[Any], ctx: CallContext, host: str, state: DoorState | None, flight: float) -> Any:
        """Deliver a request to the plane and return the answer, or the exception that it raised."""
        network = self.fabric.network
        arrives = True  # whether it may still arrive after its sender has given up
        try:
            if self._asleep is not None:
                await self._asleep.wait()
            if state not in (None, DoorState.MUTE, DoorState.GARBLES) or (self.name, host) in network.cut:
                arrives = False
                await self._door(state, flight)
            if network.strikes(network.conditions.lose_request):
                network.faults["lost request"] += 1
                arrives = False
                await self._lose(flight)
            await anyio.sleep(flight)
            try:
                answer = await self.inner.execute(call, ctx)
            except Exception as err:  # noqa: BLE001 - an error travels back as any other answer does
                return err
        except BaseException:
            if arrives and network.strikes(network.conditions.arrives_late):
                network.faults["late request"] += 1
                self.fabric.deliver(self.inner, call, ctx, flight, self._asleep)
            raise
        # A claim attempt that found no samples is not duplicated, since the duplicate might claim some.
        found = not isinstance(answer, ClaimTry) or answer.meta.size > 0
        if found and network.strikes(network.conditions.duplicate):
            network.faults["duplicate"] += 1
            self.fabric.deliver(self.inner, call, ctx, 5.0 * flight, None)
        return answer

    async def _door(self, state: DoorState | None, flight: float) -> None:
        """Fail a request to a port that does not accept it, or (None) that is cut off the network."""
        network = self.fabric.network
        network.faults["unreachable" if state is None else f"door {state.value}"] += 1
        if state in (None, DoorState.SILENT):
            await anyio.sleep_forever()
        await anyio.sleep(flight)
        if state is DoorState.REFUSES:
            raise ConnectionRefusedError("simulated: connection refused")
        raise ConnectionResetError("simulated: connection reset")

    async def _lose(self, flight: float) -> None:
        if not self.fabric.network.strikes(self.fabric.network.conditions.noticed):
            await anyio.sleep_forever()
        await anyio.sleep(flight)
        raise ConnectionResetError("simulated: connection reset")

    def _garbled(self, answer: ReadResult, call: Any) -> ReadResult:
        draw = self.fabric.network.rng.random()
        parts = [damaged(part, call, part.refs, "truncate", draw, schema=False) for part in answer.parts]
        return ReadResult(tuple(parts), answer.errors)


class Tap:
    """A sink of events that also records them, and announces probes to the link.

    Args:
        sink: The stack's own sink.
        link: Link of the client.
    """

    def __init__(self, sink: Sink, link: Link) -> None:
        """Store the sink and the link."""
        self.sink = sink
        self.link = link

    def emit(self, name: str, labels: Mapping[str, Any]) -> None:
        """Record the event and forward it to the stack's sink."""
        if name == "probe":
            self.link.probing = (labels.get("host"), labels.get("port"))
        self.link.fabric.tell(self.link.name, name, labels)
        self.sink.emit(name, labels)
