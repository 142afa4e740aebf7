"""What calls have in common: their base class, and the context that is passed along with each.

Layers and transports are services; a service executes calls with one method::

    async def execute(self, call: Call[R], ctx: CallContext) -> R
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import anyio

from asyncdp.errors import DataPlaneClosed

if TYPE_CHECKING:
    from asyncdp.compose.outcomes import PendingOutcomes
    from asyncdp.metrics.observer import Observers
    from asyncdp.rows.block import ObjectCodec
    from asyncdp.rows.device_memory import Staging

__all__ = [
    "Budget",
    "Call",
    "CallContext",
    "Clock",
    "Env",
    "OpenWaits",
    "Resend",
    "Sink",
    "handles",
]

R_co = TypeVar("R_co", covariant=True)


class Resend(Enum):
    """When the same call may be sent again after an attempt that may have reached the backend."""

    ALWAYS = "always"  # the call is idempotent
    DEDUP = "dedup"  # if the backend deduplicates by op_id; else only while no other mutation touched the same ids
    CLAIM = "claim"  # if the backend deduplicates claims by claim id
    NEVER = "never"  # it is composed of other calls, which are sent again on their own


class Call(Generic[R_co]):
    """A request to a service; executing it returns an ``R_co``."""

    __slots__ = ()
    resend: ClassVar[Resend] = Resend.ALWAYS
    #: Whether an attempt that was not answered may have changed something.
    mutates: ClassVar[bool] = False


class Clock(Protocol):
    """The source of time of the layers."""

    def now(self) -> float:
        """Return monotonic seconds, on the clock that cancel scopes use for deadlines."""

    def time(self) -> float:
        """Return the Unix time in seconds."""

    async def sleep(self, seconds: float) -> None:
        """Sleep for that many seconds."""


class Sink(Protocol):
    """Receives the events of layers."""

    def emit(self, name: str, labels: Mapping[str, Any]) -> None:
        """Take one event, such as ``("retry", {"reason": ..., "host": ..., "port": ...})``; must not raise."""


class Budget(Protocol):
    """Limits how many of the requests that are sent may be retries."""

    def deposit(self, now: float) -> None:
        """Count one user call."""

    def withdraw(self, now: float, tokens: int = 1) -> bool:
        """Take a token for each of that many retries and return True, or take none and return False."""


class OpenWaits:
    """The waits of a client's calls, which their deadlines end, and closing the client.

    On asyncio all waits share one timer, set to the earliest deadline: to set and cancel a timer for each wait takes as
    long as its cancel scope. A wait that ends before its deadline, as almost all do, leaves the timer as it is.

    Attributes:
        scopes: The cancel scope of each wait, and its deadline where the shared timer has to keep it, else infinity.
    """

    __slots__ = ("_kind", "_loop", "_next", "_timer", "closed", "scopes")

    def __init__(self) -> None:
        """Begin open, without waits."""
        self.closed = False
        self.scopes: dict[anyio.CancelScope, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._kind = anyio.CancelScope
        self._timer: asyncio.TimerHandle | None = None
        self._next = math.inf

    def scope(self, deadline: float = math.inf) -> anyio.CancelScope:
        """Return a new cancel scope of a wait, which has to be removed from ``scopes`` when the wait has ended.

        To make a scope, anyio looks for the running event loop, and initialises the scope of that kind of loop twice.
        Every attempt has one, so the kind is remembered for a loop of asyncio.
        """
        loop = asyncio._get_running_loop()  # noqa: SLF001 - get_running_loop() without raising an error on trio
        if loop is not self._loop and not self.scopes:
            self._kind = type(anyio.CancelScope())
            self._set_timer(loop, math.inf)
        if loop is None or loop is not self._loop:  # trio needs no timer; a loop beside another one has none here
            scope, deadline = anyio.CancelScope(deadline=deadline), math.inf
        else:
            if deadline < self._next:
                self._set_timer(loop, deadline)
            scope = self._kind()
        self.scopes[scope] = deadline
        return scope

    def _set_timer(self, loop: asyncio.AbstractEventLoop | None, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._loop, self._next = loop, deadline
        self._timer = None if loop is None or deadline == math.inf else loop.call_at(deadline, self._expire, loop)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel the waits whose deadline has passed, and set the timer to the earliest of the others."""
        now = max(loop.time(), self._next)  # a timer may be early, by the resolution of the clock
        due = [scope for scope, deadline in self.scopes.items() if deadline <= now]
        for scope in due:
            self.scopes[scope] = math.inf
            scope.cancel()
        self._set_timer(loop, min(self.scopes.values(), default=math.inf))

    def end(self) -> None:
        """Cancel every wait; the calls that were waiting raise DataPlaneClosed."""
        self.closed = True
        self._set_timer(self._loop, math.inf)
        for scope in list(self.scopes):
            with contextlib.suppress(RuntimeError):  # its event loop was closed before the wait had ended
                scope.cancel()


@dataclass(slots=True)
class Env:
    """State shared by all layers of one stack; made by ``stack()``.

    Attributes:
        clock: The only source of time.
        rng: The only source of randomness.
        sink: Receives events; the counters of the stack.
        budget: The retry budget.
        codec: The transport's encoding of non-tensor values.
        pending_outcomes: Mutations whose outcome is not known, since they were cancelled or not answered.
        open_waits: The waits that close() cancels.
        session: Prefix of op_ids, unique per client.
        claim_poll_s: Seconds between two polls of a blocking claim, if the backend cannot long-poll.
        long_poll_s: Seconds that one poll may wait in the backend.
        log: Writes the log line of an event: ``log(name, labels, ctx)``; None: there is no log.
        observers: Observers of calls and attempts, such as exporters; None: there are none.
        staging: Moves tensors between devices and host memory; None: nothing needed it yet.
    """

    clock: Clock
    rng: random.Random
    sink: Sink
    budget: Budget
    codec: ObjectCodec
    pending_outcomes: PendingOutcomes
    session: str
    claim_poll_s: float = 0.05
    long_poll_s: float = 1.0
    open_waits: OpenWaits = field(default_factory=OpenWaits)
    log: Callable[[str, Mapping[str, Any], CallContext], None] | None = None
    observers: Observers | None = None
    staging: Staging | None = None
    _count: int = 0

    def next_op_id(self) -> str:
        """Return a new op_id, unique over all clients."""
        self._count += 1
        return f"{self.session}-{self._count}"


@dataclass(frozen=True, slots=True)
class CallContext:
    """Context of one user call that is not part of the request.

    Attributes:
        env: State shared by the layers of the stack.
        op_id: Identifies this user call to the backend, so that a mutation sent twice under one op_id happens once.
        deadline: When the call has to end, in seconds on ``env.clock.now()``.
        verb: The user's verb, such as ``"get_data"``.
        began: When the user called the verb, in seconds on ``env.clock.now()``.
        attempt: Number of the attempt, from 1; counted by SlotRetry.
        tried: (host id, port) pairs through which the previous attempt failed; another port is preferred.
        call: The user's call, for log lines; None if there is none.
        looks_once: Whether the user called a waiting verb with ``timeout_s=0``: it polls once, within the time of one
            attempt.
    """

    env: Env
    op_id: str
    deadline: float
    verb: str
    began: float = 0.0
    attempt: int = 1
    tried: tuple[tuple[str, int], ...] = ()
    looks_once: bool = False
    call: Call[Any] | None = None

    def remaining(self) -> float:
        """Return the seconds until the deadline; negative once it has passed."""
        return self.deadline - self.env.clock.now()

    def for_attempt(self, attempt: int, tried: tuple[tuple[str, int], ...] = ()) -> CallContext:
        """Return this context with another attempt number and other tried ports."""
        return replace(self, attempt=attempt, tried=tried)

    def emit(self, name: str, **labels: Any) -> None:
        """Send an event to the sink, and to the log of faults if there is one."""
        env = self.env
        env.sink.emit(name, labels)
        if env.log is not None:
            env.log(name, labels, self)

    async def pause(self, seconds: float) -> None:
        """Sleep for ``seconds``, or until the deadline or the close of the client, whichever comes first.

        Raises:
            DataPlaneClosed: The client was closed meanwhile.
        """
        waits = self.env.open_waits
        if waits.closed:
            raise DataPlaneClosed("the client is closed", op=self.verb)
        scope = waits.scope()
        try:
            with scope:
                await self.env.clock.sleep(max(0.0, min(seconds, self.remaining())))
        finally:
            waits.scopes.pop(scope, None)
        if scope.cancelled_caught:
            raise DataPlaneClosed("the client was closed while this call waited", op=self.verb)


C_contra = TypeVar("C_contra", contravariant=True)
Handler = TypeVar("Handler", bound=Callable[..., Any])


def handles(*kinds: type[Call[Any]]) -> Callable[[Handler], Handler]:
    """Mark a method ``async def (self, call, ctx)`` of a service as the one that serves calls of these classes."""

    def mark(method: Handler) -> Handler:
        method.__handles__ = kinds  # type: ignore[attr-defined]
        return method

    return mark
