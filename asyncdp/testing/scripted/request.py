"""A request that reached a scripted backend and that the test answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from asyncdp.errors import DataPlaneClosed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncdp.calls import Call, CallContext

__all__ = ["Request", "shown"]

#: Maximum number of characters of one argument in messages: enough for ids and hosts, too few for a tensor.
SHOWN = 60


def shown(call: Call[Any]) -> str:
    """Describe a call for messages by its type and its short arguments."""
    fields = getattr(call, "__dataclass_fields__", {}).values()
    names = [field.name for field in fields if getattr(call, field.name) is not field.default]
    texts = [f"{name}={text}" for name in names if len(text := repr(getattr(call, name))) <= SHOWN]
    return f"{type(call).__name__}({', '.join(texts)}{', ...' if len(texts) < len(names) else ''})"


class Request:
    """A request that waits for its answer. The call's arguments are attributes of it, such as ``request.sample_ids``.

    Attributes:
        call: The :class:`~asyncdp.calls.Call` to answer, such as ``ReadSlots``.
        ctx: Context of the call: ``ctx.op_id``, ``ctx.attempt``, ``ctx.remaining()``.
    """

    def __init__(
        self, call: Call[Any], ctx: CallContext, onward: Callable[[Call[Any], CallContext], Awaitable[Any]] | None
    ) -> None:
        self.call = call
        self.ctx = ctx
        #: Whether the caller has stopped waiting because it was cancelled or timed out.
        self.given_up = False
        #: Whether it arrived after the client began to close, so that it need not be answered.
        self.late = ctx.env.open_waits.closed or ctx.verb == "close"
        #: Whether the wait for an answer was ended by closing the client.
        self.cut_off = False
        self._onward = onward
        self._answer: Callable[[], Awaitable[Any]] | None = None
        self._answered = anyio.Event()
        self._closed = anyio.Event()
        self._gone = anyio.Event()

    @property
    def verb(self) -> str:
        """User's verb that the request is made for, such as ``"get_samples"``."""
        return self.ctx.verb

    @property
    def answered(self) -> bool:
        """Whether the test has replied to, failed, dropped or forwarded it."""
        return self._answer is not None

    @property
    def unanswered(self) -> bool:
        """Whether the caller still waits for an answer, or waited until the client was closed."""
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
        """Answer with this value. If the caller has stopped waiting, the answer is lost, as on a network."""

        async def answer() -> Any:
            return value

        self._decide(answer)

    def fail(self, error: BaseException | type[BaseException]) -> None:
        """Answer with an error, either raw (``ConnectionResetError``) or typed (``DataPlaneNotReady(...)``)."""

        async def answer() -> Any:
            raise error

        self._decide(answer)

    def drop(self) -> None:
        """Never answer, so that the caller waits until it times out or is cancelled."""

        async def answer() -> Any:
            await self._closed.wait()
            raise self._cut()

        self._decide(answer)

    def forward(self) -> None:
        """Have the transport behind the pair answer.

        Raises:
            ValueError: The pair was made without one.
        """
        onward = self._onward
        if onward is None:
            raise ValueError("forward: there is nothing behind this pair; make it with pair(transport)")
        self._decide(lambda: onward(self.call, self.ctx))

    async def abandoned(self, timeout_s: float = 5.0) -> None:
        """Wait until the caller has stopped waiting for an answer.

        Raises:
            AssertionError: The caller still waits after ``timeout_s``.
        """
        with anyio.move_on_after(timeout_s):
            await self._gone.wait()
        if not self.given_up:
            raise AssertionError(f"after {timeout_s:g} s somebody still waits for the answer to {self}")

    def close(self) -> None:
        """End the wait for an answer because the client was closed; called by the backend."""
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

    async def wait_for_answer(self) -> Any:
        """Wait until the test answers, and return or raise the answer; called by the backend."""
        try:
            await self._answered.wait()
            if self._answer is None:
                raise self._cut()
            return await self._answer()
        except anyio.get_cancelled_exc_class():
            self.given_up = True
            self.cut_off = self.ctx.env.open_waits.closed
            raise
        finally:
            self._gone.set()

    def __repr__(self) -> str:
        """Show the call and the verb."""
        return f"{shown(self.call)} of {self.verb}"
