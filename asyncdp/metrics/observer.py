"""Observer: is told about calls, attempts and events of a client; what exporters of metrics and traces are made of."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdp.log_line import log_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncdp.client import Client

__all__ = ["AttemptEnded", "Background", "CallEnded", "Observer", "Observers", "observe"]


class CallEnded(NamedTuple):
    """A user call that ended.

    Attributes:
        op_id: Identifies it within the client's process and beyond.
        op: Its verb in short, as in events: ``put``, ``get_data``, ``claim_meta``.
        status: ``ok``, ``error``, ``timeout`` or ``cancelled``.
        seconds: How long it took.
        error: Class of the error that it raised; empty if there was none.
        partition_id: Its partition; empty if it has none.
        n_keys, n_bytes: Samples and payload bytes that it moved.
    """

    op_id: str
    op: str
    status: str
    seconds: float
    error: str
    partition_id: str
    n_keys: int
    n_bytes: int


class AttemptEnded(NamedTuple):
    """An attempt of a request that ended; a user call is made of some requests, each of some attempts.

    Attributes:
        op_id: Of the user call.
        request: What was sent: ``ReadSlots``, ``Publish``, ``TryClaim``.
        attempt: Number of the attempt, from 1.
        host, port: Where it was sent; empty and 0 if the request names no host.
        outcome: ``ok``, ``partial`` (some slots failed), the class of the error, or ``cancelled``.
        seconds: How long it took.
    """

    op_id: str
    request: str
    attempt: int
    host: str
    port: int
    outcome: str
    seconds: float


class Observer:
    """Is told, on the client's event loop, what happens; does nothing unless a subclass overrides a method.

    Methods must return at once: what may block goes into a :class:`Background`. What they raise is counted
    (``observer_errors``) and harms no call.
    """

    def call_began(self, op_id: str, verb: str) -> None:
        """A user call began."""

    def call_ended(self, call: CallEnded) -> None:
        """A user call ended."""

    def attempt_ended(self, attempt: AttemptEnded) -> None:
        """An attempt ended."""

    def event(self, name: str, labels: Mapping[str, Any]) -> None:
        """A layer did something: a retry, a quarantine."""


class Observers(Observer):
    """Tells several observers, and keeps their errors away from calls.

    Attributes:
        errors: How often an observer raised.
    """

    def __init__(self) -> None:
        """Start without observers."""
        self.members: tuple[Observer, ...] = ()
        self.errors = 0

    def call_began(self, op_id: str, verb: str) -> None:
        """Tell all."""
        for one in self.members:
            try:
                one.call_began(op_id, verb)
            except Exception as err:  # noqa: BLE001 - an exporter must not harm calls
                self._failed(one, err)

    def call_ended(self, call: CallEnded) -> None:
        """Tell all."""
        for one in self.members:
            try:
                one.call_ended(call)
            except Exception as err:  # noqa: BLE001
                self._failed(one, err)

    def attempt_ended(self, attempt: AttemptEnded) -> None:
        """Tell all."""
        for one in self.members:
            try:
                one.attempt_ended(attempt)
            except Exception as err:  # noqa: BLE001
                self._failed(one, err)

    def event(self, name: str, labels: Mapping[str, Any]) -> None:
        """Tell all."""
        for one in self.members:
            try:
                one.event(name, labels)
            except Exception as err:  # noqa: BLE001
                self._failed(one, err)

    def _failed(self, one: Observer, err: Exception) -> None:
        self.errors += 1
        if self.errors == 1:
            named = {"observer": type(one).__name__, "error": repr(err), "further": "are only counted"}
            log_line("warning", "observer_raised", **named)


def observe(client: Client, observer: Observer) -> None:
    """Tell an observer about all calls of a client from now on.

    Raises:
        TypeError: The client has no layers, so that nothing is counted: make it with ``stack()``.
    """
    env = client.env
    if env.observers is None:
        if not hasattr(env.sink, "observers"):
            msg = "a client without layers cannot be observed; stack() makes one with layers"
            raise TypeError(msg)
        env.observers = env.sink.observers = Observers()
    env.observers.members = (*env.observers.members, observer)


class Background(Observer):
    """Hands everything to another observer in a thread, so that one that is slow delays no call.

    What does not fit into the queue is dropped. The thread is a daemon: it does not keep the process alive.

    Args:
        inner: The other observer.
        size: Most items that wait.

    Attributes:
        dropped: Number of items that did not fit.
        errors: How often ``inner`` raised.
    """

    def __init__(self, inner: Observer, size: int = 10_000) -> None:
        """Begin without a thread; the first item starts it."""
        self.inner = inner
        self.dropped = self.errors = 0
        self._items: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(size)
        self._thread: threading.Thread | None = None
        self._closed = False

    def call_began(self, op_id: str, verb: str) -> None:
        """Hand it over."""
        self.put("call_began", op_id, verb)

    def call_ended(self, call: CallEnded) -> None:
        """Hand it over."""
        self.put("call_ended", call)

    def attempt_ended(self, attempt: AttemptEnded) -> None:
        """Hand it over."""
        self.put("attempt_ended", attempt)

    def event(self, name: str, labels: Mapping[str, Any]) -> None:
        """Hand it over."""
        self.put("event", name, dict(labels))

    def put(self, method: str, *args: Any) -> None:
        """Have a method of the other observer called."""
        if self._closed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="asyncdp observer", daemon=True)
            self._thread.start()
        try:
            self._items.put_nowait((method, args))
        except queue.Full:
            self.dropped += 1

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            method, args = item
            try:
                getattr(self.inner, method)(*args)
            except Exception:  # noqa: BLE001 - counted; the next item may go well
                self.errors += 1

    def close(self, timeout_s: float = 5.0) -> None:
        """Hand over what waits, for at most so many seconds, and end the thread."""
        thread, self._thread, self._closed = self._thread, None, True
        if thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._items.put(None, timeout=timeout_s)
        thread.join(timeout_s)
