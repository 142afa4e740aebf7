"""The scripted backend, whose requests a test takes and answers."""

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
    """The backend end of a pair: the test takes requests from it one after another and answers them.

    Attributes:
        taken: The requests that :meth:`next` returned, in order.
    """

    def __init__(self) -> None:
        self.taken: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._going: set[Request] = set()
        self._came: anyio.Event | None = None

    @property
    def waiting(self) -> tuple[Request, ...]:
        """The requests that arrived and were not taken yet, in order, without those whose caller has given up."""
        return tuple(request for request in self._waiting if not request.given_up)

    async def next(self, *kinds: type[Call[Any]], timeout_s: float = 5.0) -> Request:
        """Wait for the next request and return it.

        Args:
            *kinds: Types that the request must have, such as ``ReadSlots``; none: any type.
            timeout_s: Maximum wait in seconds of the loop's clock; the default suffices on a busy machine.

        Raises:
            AssertionError: No request arrived in time, or one of another type did; the message describes it.
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
        """Check that no request is waiting to be taken.

        Raises:
            AssertionError: A request is waiting.
        """
        if self.waiting:
            raise AssertionError(f"nobody expected {', '.join(str(request) for request in self.waiting)}")

    def finish(self) -> None:
        """Check that the test answered every request; ``async with pair()`` calls this at its end.

        Requests whose caller was cancelled or timed out need no answer; requests that were ended by closing the client
        do.

        Raises:
            AssertionError: A request was not taken, or was taken and never answered.
        """
        left = [f"{r} (not taken)" for r in self._waiting if r.unanswered] + [
            f"{r} (taken)" for r in self.taken if r.unanswered
        ]
        if left:
            raise AssertionError(f"{len(left)} request(s) were never answered: {'; '.join(left)}")

    def close(self) -> None:
        """End all waits; called by the transport of the pair."""
        for request in self._going:
            request.close()

    async def serve(self, request: Request) -> Any:
        """Pass a request to the test and return the answer; called by the transport of the pair."""
        self._waiting.append(request)
        self._going.add(request)
        if self._came is not None:
            self._came.set()
        try:
            return await request.wait_for_answer()
        finally:
            self._going.discard(request)

    def __repr__(self) -> str:
        """Show the waiting requests."""
        return f"<backend: {len(self.waiting)} waiting, {len(self.taken)} taken>"


class Scripted(Service):
    """The transport of a pair, which has the test answer its requests.

    Args:
        backend: The backend from which the test takes requests.
        behind: Transport that answers forwarded requests; None: there is none.
        only: Types of calls that the test answers; all others are forwarded. None: the test answers all.
        capabilities: The capabilities to report.
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
        """Return the capabilities that the test set."""
        return self._capabilities

    @property
    def object_codec(self) -> ObjectCodec:
        """Return the codec of the transport behind."""
        return super().object_codec if self.behind is None else self.behind.object_codec

    @property
    def owner(self) -> str:
        """Return the owner of the transport behind; without one, ``"pair"``."""
        return "pair" if self.behind is None else self.behind.owner

    def attach_config(self) -> dict[str, Any]:
        """Return the config of the transport behind."""
        return super().attach_config() if self.behind is None else self.behind.attach_config()

    async def execute(self, call: Call[Any], ctx: CallContext) -> Any:
        """Wait for the answer that the test gives, or pass the call on to the transport behind, if there is one."""
        onward = None if self.behind is None else self.behind.execute
        if type(call) is Probe and not (self.only and Probe in self.only):  # by default the test gets no probes
            return await (super().execute(call, ctx) if onward is None else onward(call, ctx))
        if onward is not None and self.only is not None and not isinstance(call, self.only):
            return await onward(call, ctx)
        return await self.backend.serve(Request(call, ctx, onward))

    async def on_close(self) -> None:
        """End all waits, and close the transport behind."""
        self.backend.close()
        if self.behind is not None:
            await self.behind.close()
