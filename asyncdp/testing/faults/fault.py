"""What a fault does to a request, and the one place that applies faults.

A :class:`Fault` is executed in place of a request: it sends the request, or not, and decides what its sender gets.
Three parts of the test kit decide which requests meet a fault:

- a :class:`~asyncdp.testing.faults.plan.FaultPlan`, by its rules;
- a test of the contract, by types and counts of calls: then the fault itself is a layer, ``rig.attach(Hold(PUT))``;
- the simulated network, by the states of its ports and by its conditions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from asyncdp.errors import DataPlaneTimeout, DataPlaneUnavailable
from asyncdp.service import Layer

from .trigger import Trigger

if TYPE_CHECKING:
    from asyncdp.client import Client

__all__ = [
    "Chance",
    "Delay",
    "Fail",
    "Fault",
    "Hold",
    "LoseReply",
    "LoseRequest",
    "Send",
    "Straggle",
    "Tamper",
    "Watch",
    "through",
]

#: Executes a call: ``await send(call, ctx)``.
Send = Callable[[Any, Any], Awaitable[Any]]
#: Returns the error that the sender of a request gets; None: it never gets an answer.
MakeError = Callable[[], Exception | None]

#: Seconds after which a test fails that waits for a call which never arrives.
PATIENCE_S = 60.0


async def through(faults: Sequence[Fault], call: Any, ctx: Any, send: Send) -> Any:
    """Execute a call that meets these faults, the first one outermost; ``send`` passes it on to the backend."""
    for fault in reversed(faults):
        send = partial(fault.strike, send=send)
    return await send(call, ctx)


async def answer_with(error: Exception | None, after_s: float = 0.0) -> None:
    """Raise the error after a time in seconds; without an error, wait until cancelled."""
    if error is None:
        await anyio.Event().wait()  # the event is never set, so that this waits without a timer
    elif after_s:
        await anyio.sleep(after_s)
    if error is not None:
        raise error


class Fault(Trigger):
    """A fault; used as a layer, it hits ``times`` calls of some types (none given: of all) after ``skip`` others.

    Attributes:
        kinds: The types of calls to hit.
        seen: All calls of these types, in order.
    """

    def __init__(self, *kinds: Any, times: int | None = 1, skip: int = 0) -> None:
        """Store the types and counts of calls to hit; a type may also be a tuple of types."""
        super().__init__(times, skip)
        self.kinds = tuple(kind for group in kinds for kind in (group if isinstance(group, tuple) else (group,)))
        self.seen: list[Any] = []

    def __call__(self, inner: Client) -> Layer:
        """Return the layer around ``inner``."""
        return _Layer(inner, self)

    async def serve(self, call: Any, ctx: Any, send: Send) -> Any:
        """Hit a call or pass it on."""
        if self.kinds and type(call) not in self.kinds:
            return await send(call, ctx)
        self.seen.append(call)
        return await through([self] if self.strikes() else [], call, ctx, send)

    async def strike(self, call: Any, ctx: Any, send: Send) -> Any:
        """Execute a call that is hit; the base class only passes it on."""
        return await send(call, ctx)


class _Layer(Layer):
    def __init__(self, inner: Client, fault: Fault) -> None:
        super().__init__(inner)
        self.fault = fault

    def execute(self, call: Any, ctx: Any) -> Any:
        return self.fault.serve(call, ctx, self.inner.execute)


#: A fault that only records the calls.
Watch = Fault


class Delay(Fault):
    """Delays the request, or (``reply``) its answer, by a number of seconds."""

    def __init__(self, seconds: float, *kinds: Any, reply: bool = False, **when: Any) -> None:
        """Store the delay."""
        super().__init__(*kinds, **when)
        self.seconds = seconds
        self.reply = reply

    async def strike(self, call: Any, ctx: Any, send: Send) -> Any:
        """Wait before or after the call."""
        answer = await send(call, ctx) if self.reply else None
        if self.seconds:
            await ctx.env.clock.sleep(self.seconds)
        return answer if self.reply else await send(call, ctx)


class Chance(Fault):
    """Applies another fault where ``happens`` says so.

    Args:
        fault: The other fault.
        happens: Decides; its argument is the answer, or None before the call is sent.
        reply: Whether it decides when the call has been answered, so that ``fault`` gets the answer at once.
    """

    def __init__(self, fault: Fault, happens: Callable[[Any], bool], *, reply: bool = False) -> None:
        super().__init__()
        self.fault = fault
        self.happens = happens
        self.reply = reply

    async def strike(self, call: Any, ctx: Any, send: Send) -> Any:
        """Decide, and apply the fault or not."""
        answer = await send(call, ctx) if self.reply else None
        if not self.happens(answer):
            return answer if self.reply else await send(call, ctx)

        async def answered(call: Any, ctx: Any) -> Any:
            del call, ctx
            return answer

        return await self.fault.strike(call, ctx, answered if self.reply else send)


class Fail(Fault):
    """Fails the call with the error that ``make`` returns, ``after_s`` seconds later, without sending it."""

    def __init__(self, *kinds: Any, make: MakeError | None = None, after_s: float = 0.0, **when: Any) -> None:
        """Store ``make``; default: an error for a refused connection."""
        super().__init__(*kinds, **when)
        self.make = make
        self.after_s = after_s

    def error(self, call: Any) -> Exception | None:
        """Return the error of a call; None: it gets no answer."""
        del call
        return DataPlaneUnavailable("connection refused") if self.make is None else self.make()

    async def strike(self, call: Any, ctx: Any, send: Send) -> Any:
        """Raise the error."""
        del ctx, send
        await answer_with(self.error(call), self.after_s)


class LoseRequest(Fail):
    """Loses the call before the backend gets it, which the client cannot distinguish from a lost answer."""

    def error(self, call: Any) -> Exception | None:
        """Return the error; default: a timeout that is ambiguous for mutations."""
        if self.make is None:
            return DataPlaneTimeout("the request was lost", ambiguous=call.mutates)
        return self.make()


class LoseReply(LoseRequest):
    """Executes the call and loses its answer or error; ``meanwhile`` is awaited before the client notices."""

    def __init__(self, *kinds: Any, meanwhile: Callable[[], Awaitable[Any]] | None = None, **options: Any) -> None:
        """Store what to await meanwhile."""
        super().__init__(*kinds, **options)
        self.meanwhile = meanwhile

    async def strike(self, call: Any, ctx: Any, send: Send) -> Any:
        """Execute the call and raise the error."""
        with suppress(Exception):
            await send(call, ctx)
        if self.meanwhile is not None:
            await self.meanwhile()
        await answer_with(self.error(call), self.after_s)


class Tamper(Fault):
    """Changes an answer in transit."""

    def __init__(self, *kinds: Any, change: Callable[[Any], Any], **when: Any) -> None:
        """Store the change."""
        super().__init__(*kinds, **when)
        self.change = change

    async def strike(self, call: Any, ctx: Any, send: Send) -> Any:
        """Change the answer."""
        return self.change(await send(call, ctx))


class _Held(Fault):
    """Base of faults that keep calls waiting; ``held`` is set when a call waits."""

    def __init__(self, *kinds: Any, **when: Any) -> None:
        """Start without a waiting call."""
        super().__init__(*kinds, **when)
        self.held = anyio.Event()

    async def cut(self, call: Awaitable[Any]) -> None:
        """Make a call and cancel it once it waits here."""
        self.held = anyio.Event()
        ended = False
        async with anyio.create_task_group() as group:
            group.start_soon(self._cancel, group.cancel_scope)
            await call
            ended = True
            group.cancel_scope.cancel()
        assert not ended, "the call was never held"  # noqa: S101 - what a test checks

    async def _cancel(self, scope: anyio.CancelScope) -> None:
        await self.holds()
        scope.cancel()

    async def holds(self) -> None:
        """Wait until a call waits here."""
        with anyio.fail_after(PATIENCE_S):
            await self.held.wait()


class Hold(_Held):
    """Holds a call before it is sent, or (``after``) after it was answered, until ``go`` is set."""

    def __init__(self, *kinds: Any, after: bool = False, **when: Any) -> None:
        """Start with ``go`` unset."""
        super().__init__(*kinds, **when)
        self.reply = after
        self.go = anyio.Event()

    async def strike(self, call: Any, ctx: Any, send: Send) -> Any:
        """Wait for ``go``."""
        answer = await send(call, ctx) if self.reply else None
        self.held.set()
        await self.go.wait()
        return answer if self.reply else await send(call, ctx)


class Straggle(_Held):
    """Keeps the call in transit, so that its caller gives up; ``arrive`` then delivers it to the backend."""

    def __init__(self, *kinds: Any, **when: Any) -> None:
        """Start without a call in transit."""
        super().__init__(*kinds, **when)
        self.arrive: Callable[[], Awaitable[Any]]

    async def strike(self, call: Any, ctx: Any, send: Send) -> Any:
        """Never answer."""
        self.arrive = lambda: send(call, ctx)
        self.held.set()
        await answer_with(None)
