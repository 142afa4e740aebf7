"""Faults that a test puts between a transport and its layers.

Each is given to ``rig.attach`` or ``rig.open``, strikes the calls of some kinds, and tells what it saw. Backends are
asked in one piece or in slot calls: ``PUT``, ``GET``, ``CLAIM`` and ``CLEAR`` name the one call that does it.
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

#: Seconds until a test that waits for a call which never comes fails.
PATIENCE_S = 10.0
PUT = (Publish, PutSamples)
GET = (ReadSlots, GetSamples)
CLAIM = (TryClaim, ClaimMeta)
CLEAR = (ClearSamples, PopSamples, EvictSamples)


class Fault:
    """Strikes the first ``times`` calls of some kinds (none given: of all) that come after ``skip`` others.

    Attributes:
        seen: Every call of these kinds, in order.
        struck: How many of them it struck.
    """

    def __init__(self, *kinds: Any, times: int = 1, skip: int = 0) -> None:
        """Keep what to strike."""
        self.kinds = tuple(kind for group in kinds for kind in (group if isinstance(group, tuple) else (group,)))
        self.times = times
        self.skip = skip
        self.seen: list[Any] = []
        self.struck = 0

    def __call__(self, inner: Client) -> Layer:
        """Become a layer."""
        return _Layer(inner, self)

    async def serve(self, call: Any, ctx: Any, send: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        """Strike, or pass on."""
        if self.kinds and type(call) not in self.kinds:
            return await send(call, ctx)
        self.seen.append(call)
        if len(self.seen) <= self.skip or self.struck >= self.times:
            return await send(call, ctx)
        self.struck += 1
        return await self.strike(call, ctx, send)

    async def strike(self, call: Any, ctx: Any, send: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        """Do harm; a plain Fault only watches."""
        return await send(call, ctx)


class _Layer(Layer):
    def __init__(self, inner: Client, fault: Fault) -> None:
        super().__init__(inner)
        self.fault = fault

    def execute(self, call: Any, ctx: Any) -> Any:
        return self.fault.serve(call, ctx, self.inner.execute)


Watch = Fault


class LoseReply(Fault):
    """The backend acts, its answer is lost; ``meanwhile`` happens before the client notices."""

    def __init__(self, *kinds: Any, meanwhile: Callable[[], Awaitable[Any]] | None = None, **when: Any) -> None:
        """Keep what happens meanwhile."""
        super().__init__(*kinds, **when)
        self.meanwhile = meanwhile

    async def strike(self, call: Any, ctx: Any, send: Any) -> Any:
        """Act, then say nothing."""
        await send(call, ctx)
        if self.meanwhile is not None:
            await self.meanwhile()
        raise DataPlaneTimeout("the answer was lost", ambiguous=call.mutates)


class LoseRequest(Fault):
    """The backend never gets the call; the client cannot tell that from a lost answer."""

    async def strike(self, call: Any, ctx: Any, send: Any) -> Any:
        """Send nothing."""
        raise DataPlaneTimeout("the request was lost", ambiguous=call.mutates)


class Fail(Fault):
    """The call fails with an error of ``make``, and nothing was sent."""

    def __init__(self, *kinds: Any, make: Callable[[], DataPlaneError] | None = None, **when: Any) -> None:
        """Keep the error; default: connection refused."""
        super().__init__(*kinds, **when)
        self.make = make or (lambda: DataPlaneUnavailable("connection refused"))

    async def strike(self, call: Any, ctx: Any, send: Any) -> Any:
        """Refuse."""
        raise self.make()


class Held(Fault):
    """A fault that keeps its calls waiting; ``held`` is set once one waits."""

    def __init__(self, *kinds: Any, **when: Any) -> None:
        """Begin with none."""
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
    """Stops a call, before it is sent or (``after``) when its answer is there, until ``go`` is set."""

    def __init__(self, *kinds: Any, after: bool = False, **when: Any) -> None:
        """Begin closed."""
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
    """The call is on its way for ever: who waits for it gives up. ``arrive`` lets it reach the backend after all."""

    def __init__(self, *kinds: Any, **when: Any) -> None:
        """Begin with nothing on its way."""
        super().__init__(*kinds, **when)
        self.arrive: Callable[[], Awaitable[Any]]

    async def strike(self, call: Any, ctx: Any, send: Any) -> Any:
        """Never answer."""
        self.arrive = lambda: send(call, ctx)
        self.held.set()
        await anyio.sleep_forever()


class Tamper(Fault):
    """Changes an answer on its way."""

    def __init__(self, *kinds: Any, change: Callable[[Any], Any], **when: Any) -> None:
        """Keep the change."""
        super().__init__(*kinds, **when)
        self.change = change

    async def strike(self, call: Any, ctx: Any, send: Any) -> Any:
        """Change the answer."""
        return self.change(await send(call, ctx))
