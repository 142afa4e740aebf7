"""The link of one client to the simulated network; stands between its stack and its transport."""

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

#: The directory's place among the hosts.
DIRECTORY = "directory"


def _key(ref: SlotRef) -> SlotKey:
    return ref.host.id, ref.host.epoch, ref.slot, ref.generation, ref.fields, tuple(ref.index)


def _subject(call: Any) -> object:
    """What tells two requests of one user call apart."""
    host = getattr(call, "host", None)
    rows = getattr(call, "first_row", None)
    refs = tuple((ref.slot, ref.generation) for ref in getattr(call, "refs", ()))
    return None if host is None else host.id, rows, refs, getattr(call, "sample_ids", None)


class Link(Layer):
    """Carries the requests of one client over the network: late, twice, or not at all.

    What is on its way goes on when its sender gives up: it may arrive, and be executed, long after.

    Args:
        inner: The client's transport.
        fabric: Where it belongs.
        name: Who the client is.
    """

    def __init__(self, inner: Service | Client, fabric: Fabric, name: str) -> None:
        """Begin awake."""
        super().__init__(inner)
        self.fabric = fabric
        self.name = name
        #: The port to which the next request is a probe.
        self.probing: tuple[Any, Any] | None = None
        self._asleep: anyio.Event | None = None

    # -- a client that is paused

    def pause(self) -> None:
        """Hold back whatever the client sends, and what is sent to it."""
        if self._asleep is None:
            self._asleep = anyio.Event()

    def wake(self) -> None:
        """Let everything go that was held back."""
        if self._asleep is not None:
            self._asleep.set()
            self._asleep = None

    # -- requests

    async def execute(self, call: Call[R], ctx: CallContext) -> R:
        """Send a request, and note how it ended."""
        note = self._note(call, ctx)
        try:
            result = await self._send(call, ctx, note)
        except Exception as err:
            answer = isinstance(err, DataPlaneError) and (not err.retryable or isinstance(err, DataPlaneNotReady))
            note.ended, note.fault = type(err).__name__, not answer
            raise
        except BaseException:  # a timeout of the attempt looks like this, too
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
        place = getattr(call, "host_id", None) if host is None else host.id  # a Probe goes where it asks about
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
        if flight > 2.0 * network.conditions.latency_s:  # slow requests have slow replies; others come back at once
            await anyio.sleep(flight)
        if self._asleep is not None:
            await self._asleep.wait()
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    async def _there(self, call: Call[Any], ctx: CallContext, host: str, state: DoorState | None, flight: float) -> Any:
        """Bring a request to the plane; returns its answer, which may be an exception."""
        network = self.fabric.network
        arrives = True  # in the end, if its sender gives up on it
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
        # A look for samples that found none is no request that was served: it may find some when it comes again.
        found = not isinstance(answer, ClaimTry) or answer.meta.size > 0
        if found and network.strikes(network.conditions.duplicate):
            network.faults["duplicate"] += 1
            self.fabric.deliver(self.inner, call, ctx, 5.0 * flight, None)
        return answer

    async def _door(self, state: DoorState | None, flight: float) -> None:
        """Find a door that does not let in; None: there is no way to it."""
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
    """A sink that also tells the history, and the link of a port that is about to be probed.

    Args:
        sink: The stack's own.
        link: The client's link.
    """

    def __init__(self, sink: Sink, link: Link) -> None:
        """Keep both."""
        self.sink = sink
        self.link = link

    def emit(self, name: str, labels: Mapping[str, Any]) -> None:
        """Pass it on."""
        if name == "probe":
            self.link.probing = (labels.get("host"), labels.get("port"))
        self.link.fabric.tell(self.link.name, name, labels)
        self.sink.emit(name, labels)
