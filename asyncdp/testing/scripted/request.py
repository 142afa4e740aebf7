"""One request that reached a scripted backend, and that the test answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from asyncdp.errors import DataPlaneClosed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncdp.calls import Call, CallContext

__all__ = ["Request", "shown"]

#: Characters of one argument that a message shows: enough for ids and hosts, not for a tensor.
SHOWN = 60


def shown(call: Call[Any]) -> str:
    """Write a call so that a person knows it again: its type and its short arguments."""
    names = [name for name in getattr(call, "__dataclass_fields__", ()) if getattr(call, name) is not None]
    texts = [f"{name}={text}" for name in names if len(text := repr(getattr(call, name))) <= SHOWN]
    return f"{type(call).__name__}({', '.join(texts)}{', ...' if len(texts) < len(names) else ''})"


class Request:
    """A request that waits for its answer. The arguments of the call can be asked for here: ``request.sample_ids``.

    Attributes:
        call: What is asked: a :class:`~asyncdp.calls.Call`, such as ``ReadSlots``.
        ctx: Its context: ``ctx.op_id``, ``ctx.attempt``, ``ctx.remaining()``.
    """

    def __init__(
        self, call: Call[Any], ctx: CallContext, onward: Callable[[Call[Any], CallContext], Awaitable[Any]] | None
    ) -> None:
        self.call = call
        self.ctx = ctx
        #: Whether whoever asked does not wait any more: it was cancelled, or ran out of time.
        self.given_up = False
        #: Whether it came after the client began to close: nobody has to answer it.
        self.late = ctx.env.life.closed or ctx.verb == "close"
        #: Whether closing the client is what ended the wait for an answer.
        self.cut_off = False
        self._onward = onward
        self._answer: Callable[[], Awaitable[Any]] | None = None
        self._answered = anyio.Event()
        self._closed = anyio.Event()
        self._gone = anyio.Event()

    @property
    def verb(self) -> str:
        """The user's verb that it is made for, such as ``"get_samples"``."""
        return self.ctx.verb

    @property
    def answered(self) -> bool:
        """Whether the test has decided about it: replied, failed, dropped or forwarded."""
        return self._answer is not None

    @property
    def owed(self) -> bool:
        """Whether somebody waited for an answer until the client was closed, or still does."""
        return not self.answered and not self.late and (self.cut_off or not self.given_up)

    def __getattr__(self, name: str) -> Any:
        """Return an argument of the call."""
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return getattr(self.call, name)
        except AttributeError:
            raise AttributeError(f"neither a request nor {type(self.call).__name__} has {name!r}") from None

    def reply(self, value: Any = None) -> None:
        """Answer with this value. Where nobody waits any more, the answer comes too late and is lost, as on a wire."""

        async def answer() -> Any:
            return value

        self._decide(answer)

    def fail(self, error: BaseException | type[BaseException]) -> None:
        """Answer with an error, raw (``ConnectionResetError``) or typed (``DataPlaneNotReady(...)``)."""

        async def answer() -> Any:
            raise error

        self._decide(answer)

    def drop(self) -> None:
        """Never answer: whoever asks waits until his time is over."""

        async def answer() -> Any:
            await self._closed.wait()
            raise self._cut()

        self._decide(answer)

    def forward(self) -> None:
        """Let the transport behind the pair answer.

        Raises:
            ValueError: The pair was made without one.
        """
        onward = self._onward
        if onward is None:
            raise ValueError("forward: there is nothing behind this pair; make it with pair(transport)")
        self._decide(lambda: onward(self.call, self.ctx))

    async def abandoned(self, timeout_s: float = 5.0) -> None:
        """Wait until whoever asked has given up.

        Raises:
            AssertionError: He still waits after ``timeout_s``.
        """
        with anyio.move_on_after(timeout_s):
            await self._gone.wait()
        if not self.given_up:
            raise AssertionError(f"after {timeout_s:g} s somebody still waits for the answer to {self}")

    def close(self) -> None:
        """End the wait for an answer: the client was closed; for the backend."""
        self._closed.set()
        if self._answer is None:
            self.cut_off = True
            self._answered.set()

    def _cut(self) -> DataPlaneClosed:
        return DataPlaneClosed("the client was closed while this call waited", op=self.verb)

    def _decide(self, answer: Callable[[], Awaitable[Any]]) -> None:
        if self._answer is not None:
            raise AssertionError(f"{self} has been answered already")
        self._answer = answer
        self._answered.set()

    async def settled(self) -> Any:
        """Wait for the test's decision and carry it out; for the backend."""
        try:
            await self._answered.wait()
            if self._answer is None:
                raise self._cut()
            return await self._answer()
        except anyio.get_cancelled_exc_class():
            self.given_up = True
            self.cut_off = self.ctx.env.life.closed
            raise
        finally:
            self._gone.set()

    def __repr__(self) -> str:
        """Say what is asked, and for which verb."""
        return f"{shown(self.call)} of {self.verb}"
