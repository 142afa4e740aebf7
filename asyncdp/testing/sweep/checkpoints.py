"""Checkpoints of a call: the points where it, or a child task that makes a request for it, yields to the event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio

from asyncdp.factory import layers_of

if TYPE_CHECKING:
    from asyncdp.client import Client

__all__ = ["Checkpoints"]


class Checkpoints:
    """Counts the checkpoints of a call and cancels it at a chosen one.

    Args:
        at: Number of the checkpoint to cancel at, from 1; None: only count.
    """

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.passed = 0
        self.cancel: Callable[[], object] = lambda: None
        self._home: int | None = None

    @property
    def reached(self) -> bool:
        """Whether the call reached the chosen checkpoint."""
        return self.at is not None and self.passed >= self.at

    async def run(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Await a call and count its checkpoints."""
        self._home = anyio.get_current_task().id
        return await self._watched(call().__await__())

    @contextmanager
    def on_wire(self, client: Client) -> Iterator[None]:
        """Also count the checkpoints at which child tasks wait for the transport."""
        *_, transport = layers_of(client)
        before = transport.execute

        def execute(call: Any, ctx: Any) -> Coroutine[Any, Any, Any]:
            going = before(call, ctx)
            if anyio.get_current_task().id == self._home:
                return going  # its checkpoints are counted by run()
            return self._awaited(going)

        transport.execute = execute  # type: ignore[method-assign]
        try:
            yield
        finally:
            del transport.execute

    async def _awaited(self, going: Coroutine[Any, Any, Any]) -> Any:
        return await self._watched(going.__await__())

    def _watched(self, inner: Generator[Any, Any, Any]) -> _Watched:
        return _Watched(inner, self._pass)

    def _pass(self) -> None:
        self.passed += 1
        if self.passed == self.at:
            self.cancel()


class _Watched:
    """Awaits an awaitable and reports each of its checkpoints."""

    def __init__(self, inner: Generator[Any, Any, Any], passed: Callable[[], None]) -> None:
        self._inner = inner
        self._passed = passed

    def __await__(self) -> Generator[Any, Any, Any]:
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                waits_for = self._inner.send(value) if error is None else self._inner.throw(error)
            except StopIteration as end:
                return end.value
            self._passed()
            value = error = None
            try:
                value = yield waits_for
            except BaseException as err:  # noqa: BLE001 - thrown on into what is awaited
                error = err
