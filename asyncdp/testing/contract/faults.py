"""Fault layers that a test places between a transport and its default layers.

Each is passed to ``rig.attach`` or ``rig.open``, affects calls of some types, and records what it saw. Backends get
either whole verbs or slot calls: ``PUT``, ``GET``, ``CLAIM`` and ``CLEAR`` contain the deciding call of both kinds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio

from asyncdp import (
    ClaimMeta,
    ClearSamples,
    DataPlaneError,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    EvictSamples,
    GetSamples,
    Layer,
    PopSamples,
    PutSamples,
    ReadSlots,
    TryClaim,
)
from asyncdp.calls.slots import Publish

if TYPE_CHECKING:
    from asyncdp.client import Client

__all__ = [
    "CLAIM",
    "CLEAR",
    "GET",
    "PUT",
    "Fail",
    "Fault",
    "Hold",
    "LoseReply",
    "LoseRequest",
    "Straggle",
    "Tamper",
    "Watch",
]

#: Seconds after which a test fails that waits for a call which never arrives.
PATIENCE_S = 10.0
PUT = (Publish, PutSamples)
GET = (ReadSlots, GetSamples)
CLAIM = (TryClaim, ClaimMeta)
CLEAR = (ClearSamples, PopSamples, EvictSamples)


class Fault:
    """Affects the first ``times`` calls of some types (none given: of all types) after ``skip`` others.

    Attributes:
        seen: All calls of these types, in order.
        struck: Number of affected calls.
    """

    def __init__(self, *kinds: Any, times: int = 1, skip: int = 0) -> None:
        """Store the types and counts of calls to affect."""
        self.kinds = tuple(kind for group in kinds for kind in (group if isinstance(group, tuple) else (group,)))
        self.times = times
        self.skip = skip
        self.seen: list[Any] = []
        self.struck = 0

    def __call__(self, inner: Client) -> Layer:
        """Return the layer around ``inner``."""
        return _Layer(inner, self)

    async def serve(self, call: Any, ctx: Any, send: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        """Affect a call or pass it on."""
        if self.kinds and type(call) not in self.kinds:
            return await send(call, ctx)
        self.seen.append(call)
        if len(self.seen) <= self.skip or self.struck >= self.times:
            return await send(call, ctx)
        self.struck += 1
        return await self.strike(call, ctx, send)

    async def strike(self, call: Any, ctx: Any, send: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        """Execute an affected call; the base class only passes it on."""
        return await send(call, ctx)


class _Layer(Layer):
    def __init__(self, inner: Client, fault: Fault) -> None:
        super().__init__(inner)
        self.fault = fault

    def execute(self, call: Any, ctx: Any) -> Any:
        return self.fault.serve(call, ctx, self.inner.execute)


Watch = Fault


class LoseReply(Fault):
    """Executes the call and loses its answer; ``meanwhile`` is awaited before the client notices."""

    def __init__(self, *kinds: Any, meanwhile: Callable[[], Awaitable[Any]] | None = None, **when: Any) -> None:
        """Store what to await meanwhile."""
        super().__init__(*kinds, **when)
        self.meanwhile = meanwhile

    async def strike(self, call: Any, ctx: Any, send: Any) -> Any:
        """Execute the call and raise as if the connection were lost."""
        await send(call, ctx)
        if self.meanwhile is not None:
            await self.meanwhile()
        raise DataPlaneTimeout("the answer was lost", ambiguous=call.mutates)


class LoseRequest(Fault):
    """Loses the call before the backend gets it, which the client cannot distinguish from a lost answer."""

    async def strike(self, call: Any, ctx: Any, send: Any) -> Any:
        """Raise as if the connection were lost, without sending the call."""
        raise DataPlaneTimeout("the request was lost", ambiguous=call.mutates)


class Fail(Fault):
    """Fails the call with the error that ``make`` returns, without sending it."""

    def __init__(self, *kinds: Any, make: Callable[[], DataPlaneError] | None = None, **when: Any) -> None:
        """Store ``make``; default: an error for a refused connection."""
        super().__init__(*kinds, **when)
        self.make = make or (lambda: DataPlaneUnavailable("connection refused"))

    async def strike(self, call: Any, ctx: Any, send: Any) -> Any:
        """Raise the error."""
        raise self.make()


class Held(Fault):
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
        assert not ended, "the call was never held"

    async def _cancel(self, scope: anyio.CancelScope) -> None:
        await self.holds()
        scope.cancel()

    async def holds(self) -> None:
        """Wait until a call waits here."""
        with anyio.fail_after(PATIENCE_S):
            await self.held.wait()


class Hold(Held):
    """Holds a call before it is sent, or (``after``) after it was answered, until ``go`` is set."""

    def __init__(self, *kinds: Any, after: bool = False, **when: Any) -> None:
        """Start with ``go`` unset."""
        super().__init__(*kinds, **when)
        self.after = after
        self.go = anyio.Event()

    async def strike(self, call: Any, ctx: Any, send: Any) -> Any:
        """Wait for ``go``."""
        answer = await send(call, ctx) if self.after else None
        self.held.set()
        await self.go.wait()
        return answer if self.after else await send(call, ctx)


class Straggle(Held):
    """Keeps the call in transit, so that its caller gives up; ``arrive`` then delivers it to the backend."""

    def __init__(self, *kinds: Any, **when: Any) -> None:
        """Start without a call in transit."""
        super().__init__(*kinds, **when)
        self.arrive: Callable[[], Awaitable[Any]]

    async def strike(self, call: Any, ctx: Any, send: Any) -> Any:
        """Never answer."""
        self.arrive = lambda: send(call, ctx)
        self.held.set()
        await anyio.sleep_forever()


class Tamper(Fault):
    """Changes an answer in transit."""

    def __init__(self, *kinds: Any, change: Callable[[Any], Any], **when: Any) -> None:
        """Store the change."""
        super().__init__(*kinds, **when)
        self.change = change

    async def strike(self, call: Any, ctx: Any, send: Any) -> Any:
        """Change the answer."""
        return self.change(await send(call, ctx))
