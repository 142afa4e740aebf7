"""A backend that a test plays."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import anyio

from asyncdp.calls.slots import Probe
from asyncdp.service import Service

from .request import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdp.calls import Call, CallContext
    from asyncdp.meta import DataPlaneCapabilities
    from asyncdp.rows.block import ObjectCodec

__all__ = ["Backend", "Scripted"]


class Backend:
    """The other end of a pair: requests come out here, one after the other, and wait for their answers.

    Attributes:
        taken: The requests that :meth:`next` returned, in their order.
    """

    def __init__(self) -> None:
        self.taken: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._going: set[Request] = set()
        self._came: anyio.Event | None = None

    @property
    def waiting(self) -> tuple[Request, ...]:
        """The requests that have come and were not taken yet, in order; without those that were given up."""
        return tuple(request for request in self._waiting if not request.given_up)

    async def next(self, *kinds: type[Call[Any]], timeout_s: float = 5.0) -> Request:
        """Return the next request, waiting for it.

        Args:
            *kinds: What it has to be, such as ``ReadSlots``; none: anything.
            timeout_s: How long it may take to come, in seconds of the loop's clock; long enough for a busy machine.

        Raises:
            AssertionError: None came in time, or one of another kind came; the message says what did.
        """
        wanted = " or ".join(kind.__name__ for kind in kinds) or "request"
        with anyio.move_on_after(timeout_s):
            while not self.waiting:
                self._came = anyio.Event()
                await self._came.wait()
        there = self.waiting
        if not there:
            before = ", ".join(str(request) for request in self.taken) or "nothing"
            raise AssertionError(f"no {wanted} came within {timeout_s:g} s; what came before: {before}")
        request = there[0]
        if kinds and not isinstance(request.call, kinds):
            more = f"; behind it: {', '.join(str(other) for other in there[1:])}" if there[1:] else ""
            raise AssertionError(f"the next request is {request}, where {wanted} was expected{more}")
        self._waiting.remove(request)
        self.taken.append(request)
        return request

    def nothing(self) -> None:
        """Check that no request waits to be taken.

        Raises:
            AssertionError: One does.
        """
        if self.waiting:
            raise AssertionError(f"nobody expected {', '.join(str(request) for request in self.waiting)}")

    def finish(self) -> None:
        """Check that the test answered every request; ``async with pair()`` does it.

        Whoever gave up on a request, because he was cancelled or ran out of time, is not waited for; closing the client
        does not count as that.

        Raises:
            AssertionError: Some were not taken, or were taken and never answered.
        """
        left = [f"{r} (not taken)" for r in self._waiting if r.owed] + [f"{r} (taken)" for r in self.taken if r.owed]
        if left:
            raise AssertionError(f"{len(left)} request(s) were never answered: {'; '.join(left)}")

    def close(self) -> None:
        """End all waits; for the transport of the pair."""
        for request in self._going:
            request.close()

    async def serve(self, request: Request) -> Any:
        """Take a request in and return its answer; for the transport of the pair."""
        self._waiting.append(request)
        self._going.add(request)
        if self._came is not None:
            self._came.set()
        try:
            return await request.settled()
        finally:
            self._going.discard(request)

    def __repr__(self) -> str:
        """Say what waits."""
        return f"<backend: {len(self.waiting)} waiting, {len(self.taken)} taken>"


class Scripted(Service):
    """The transport of a pair: asks the test.

    Args:
        backend: Where the test sits.
        behind: A transport that answers what is forwarded.
        only: The kinds of calls that the test answers; what else comes is forwarded. None: all.
        capabilities: What it claims to guarantee.
    """

    def __init__(
        self,
        backend: Backend,
        behind: Service | None,
        only: Sequence[type[Call[Any]]] | None,
        capabilities: DataPlaneCapabilities,
    ) -> None:
        super().__init__()
        self.backend = backend
        self.behind = behind
        self.only = None if only is None else tuple(only)
        self._capabilities = capabilities
        self.error_table = tuple(getattr(behind, "error_table", ()))

    def get_capabilities(self) -> DataPlaneCapabilities:
        """Tell what the test said that it guarantees."""
        return self._capabilities

    @property
    def object_codec(self) -> ObjectCodec:
        """That of the transport behind."""
        return super().object_codec if self.behind is None else self.behind.object_codec

    @property
    def owner(self) -> str:
        """That of the transport behind."""
        return "pair" if self.behind is None else self.behind.owner

    def attach_config(self) -> dict[str, Any]:
        """That of the transport behind."""
        return super().attach_config() if self.behind is None else self.behind.attach_config()

    async def execute(self, call: Call[Any], ctx: CallContext) -> Any:
        """Ask the test, or the transport behind."""
        onward = None if self.behind is None else self.behind.execute
        if type(call) is Probe and not (self.only and Probe in self.only):  # a test that means outages says so
            return await (super().execute(call, ctx) if onward is None else onward(call, ctx))
        if onward is not None and self.only is not None and not isinstance(call, self.only):
            return await onward(call, ctx)
        return await self.backend.serve(Request(call, ctx, onward))

    async def on_close(self) -> None:
        """End the waits, and close what is behind."""
        self.backend.close()
        if self.behind is not None:
            await self.behind.close()
