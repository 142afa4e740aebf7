"""UCX on an event loop: no polling while idle, no thread, and buffers pinned until UCX is done with them.

ucxx's own wait spins on the loop, so that one idle connection costs a whole core. Here the loop watches the worker's
file descriptor, runs progress when it is readable and arms it again. Two rules prevent crashes and mixed-up messages:

* A cancelled request may still write into its buffer for a while (measured: up to 86 ms); if the memory were freed, the
  process would crash. Therefore request, array and buffer are pinned from the post until the request has ended, even
  where its waiter was cancelled.
* A connection with a cancelled operation is abandoned, because the next receive on it would get the old message.

Any process that reaches a UCX listener may send messages with any tag, without authentication. Therefore tags are drawn
at random for each transfer, and a listening engine drops messages for which no receive was posted.

UCX does not survive a fork. In a child the engine is closed, and its native objects are never destroyed, because that
would end the child by SIGABRT or harm its parent.
"""

from __future__ import annotations

import asyncio
import copy
import os
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from asyncdp.errors import DataPlaneClosed, DataPlaneUnsupported
from asyncdp.process.forks import never_destroy, on_fork

from .messages import WireError

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["MESSAGE_BYTES", "Engine", "Operation", "load_ucx"]

#: Largest message in bytes: a larger one blocks the loop (256 MB: 5-75 ms) and is not faster.
MESSAGE_BYTES: Final = 16 << 20
#: Tags reserved per request; a request has fewer messages, since each takes some bytes of a frame of at most 16 MiB.
_TAGS_PER_REQUEST: Final = 1 << 22
#: Bits of a tag on the wire.
_TAG_BITS: Final = 62
#: Most unexpected messages that are dropped before the loop runs again (9 us each, measured).
_DROPPED_AT_ONCE: Final = 64
#: Environment variables that UCX reads when it is loaded. put_zcopy: rendezvous on host memory is five times faster
#: than with ucxx's default. REUSEADDR: the port of a killed host would otherwise stay in use for a minute. LOG_FILE:
#: standard output belongs to the program (a slot host's readiness line). LOG_LEVEL: UCX would print a page of warnings
#: for each message of a kind that this process does not accept. WARN_UNUSED: ucxx itself sets variables that UCX does
#: not use.
_ENVIRONMENT: Final = {
    "UCX_RNDV_SCHEME": "put_zcopy",
    "UCX_CM_REUSEADDR": "y",
    "UCX_TCP_CM_REUSEADDR": "y",
    "UCX_LOG_FILE": "stderr",
    "UCX_LOG_LEVEL": "error",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
#: Bytes at the end of a buffer, random for each engine, by which a receive knows that its message was shorter: of a
#: longer one UCX makes an error, of a shorter one ucxx tells nothing. One that ends within these bytes is taken; some
#: of them remain.
_MARK_BYTES: Final = 8
#: Attribute of the library that stores the id of the process that uses it.
_USER: Final = "asyncdp_user"


class Endpoint:
    """A UCX connection; ``native`` is ucxx's object. It keeps its engine alive."""

    __slots__ = ("__weakref__", "_engine", "native")

    def __init__(self, native: Any, engine: Engine) -> None:
        """Keep the native endpoint and its engine."""
        self.native = native
        self._engine = engine
        on_fork(self)

    def after_fork(self) -> None:
        """Keep the parent's connection from being destroyed in a forked child."""
        never_destroy(self.native)


class Operation:
    """A posted send or receive.

    Attributes:
        ended: Future that is done when UCX no longer uses the buffer, after success or failure.
    """

    __slots__ = ("_engine", "ended", "endpoint", "error", "keep", "mark", "request")

    def __init__(self, engine: Engine, request: Any, endpoint: Endpoint, keep: Any) -> None:
        """Keep the request and ``keep``, its buffer, alive until UCX is done with them."""
        self._engine = engine
        self.request: Any = request
        self.endpoint: Endpoint | None = endpoint
        self.keep = keep
        #: Bytes that were put at the end of a receive's buffer; b"": it is too short for a mark, or no receive.
        self.mark = b""
        self.error: Exception | None = None
        self.ended: asyncio.Future[None] = engine.loop.create_future()

    @property
    def completed(self) -> bool:
        """Whether UCX has completed the request."""
        return self.request is None or bool(self.request.completed)

    def finish(self) -> None:
        """Release the native objects and the buffer, after UCX has completed the request."""
        try:
            self.request.check_error()
            if self.mark and self.keep[0][-_MARK_BYTES:].tobytes() == self.mark:
                self.error = WireError(f"a message came that is shorter than the {len(self.keep[0])} bytes announced")
        except Exception as err:  # noqa: BLE001 - raised by wait()
            self.error = err.with_traceback(None)
        self.request = self.endpoint = self.keep = None
        if not self.ended.done():
            self.ended.set_result(None)

    async def wait(self) -> None:
        """Wait until the operation has ended; spin for ``spin_s`` first, because small messages take less than a sleep.

        Raises:
            WireError: The message that was received is shorter than the buffer.
            Exception: An error of UCX (``UCXX...Error``).
        """
        until = time.perf_counter() + self._engine.spin_s
        while not self.completed and time.perf_counter() < until:
            self._engine.progress()
            await asyncio.sleep(0)
        if not self.ended.done():
            self._engine.poll()
            await asyncio.shield(self.ended)
        if self.error is not None:
            # A copy: the traceback of a stored error would keep this frame and its callers', with all their buffers,
            # in a cycle until the next garbage collection, which an idle process never runs.
            raise copy.copy(self.error)


class Engine:
    """A UCX worker on the running loop; created once per loop.

    Args:
        devices: Network devices that UCX may use, such as ``"lo"`` or ``"mlx5_0:1"``; None: all.
        spin_s: Seconds for which a wait spins before it sleeps (measured: 50 us halves the time of 1 KB).

    Raises:
        ImportError: ucxx is not installed; the message names the extra.
        DataPlaneUnsupported: This process was forked from one that had used UCX.
    """

    def __init__(self, *, devices: str | None = None, spin_s: float = 50e-6) -> None:
        """Create the worker and watch its file descriptor."""
        self._ucx = _load()
        _claim(self._ucx["libucxx"])
        self.loop = asyncio.get_running_loop()
        self.spin_s = spin_s
        self.polls = 0
        self.posted = 0
        self._array: Callable[[Any], Any] = self._ucx["Array"]
        config = {"NET_DEVICES": devices} if devices else {}
        # Fewer features than ucxx's default: unexpected active messages are kept for ever, and by remote memory access
        # a peer can read and write any address of this process where UCX implements it in software.
        feature = self._ucx["Feature"]
        features = (feature.TAG, feature.STREAM, feature.WAKEUP)
        self._worker: Any = self._ucx["UCXWorker"](self._ucx["UCXContext"](config, features))
        self._operations: dict[int, Operation] = {}
        self._abandoned: set[int] = set()
        self._endpoints: weakref.WeakSet[Endpoint] = weakref.WeakSet()
        self._listener: Any = None
        self._kicked = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.dropped = 0
        self._drops = False
        self._behind = False
        self._mark = secrets.token_bytes(_MARK_BYTES)
        self._marked = np.frombuffer(self._mark, np.uint8)
        self._any_tag = self._ucx["Tag"](0), self._ucx["TagMask"](0)
        self._sink = self._array(np.empty(1, np.uint8))
        self._sunk: list[Any] = []
        self._worker.init_blocking_progress_mode()
        self._fd = self._worker.epoll_file_descriptor
        self.loop.add_reader(self._fd, self._readable)
        on_fork(self)
        self._kick()

    # -- the loop

    def progress(self) -> None:
        """Run one step of UCX's progress."""
        if not self._closed:
            self._worker.progress_once()

    def _readable(self) -> None:
        self.polls += 1
        self.poll()

    def poll(self) -> None:
        """Run UCX's progress, finish completed operations, and arm the descriptor for the next event."""
        if self._closed:
            return
        if not self._behind:  # else more messages would come than are dropped, and UCX never gives back their memory
            self._advance()
        if self._drops:
            self._behind = self._drop_unexpected()
        for key, operation in list(self._operations.items()):
            if operation.completed:
                del self._operations[key]
                operation.finish()
        if not self._kicked and not self._worker.arm():
            self._kick()  # an event arrived in the meantime
        if self._operations and self._timer is None:
            wait_s = 0.005 if self._abandoned else 0.05
            self._timer = self.loop.call_later(wait_s, self._tick)
        if not self._operations:
            self._abandoned.clear()

    def _advance(self) -> None:
        """Run UCX's progress for a bounded number of steps, so that a large transfer does not starve the loop."""
        for _ in range(64):
            if not self._worker.progress_once():
                self._worker.progress()  # progress_once alone never runs the cancels that a dead peer schedules
                return
        self._kick()

    def _drop_unexpected(self) -> bool:
        """Receive and drop unexpected messages, which UCX would otherwise keep for as long as the worker exists.

        Returns whether there may be more of them than are dropped at once.
        """
        tag, mask = self._any_tag
        behind = True
        for _ in range(_DROPPED_AT_ONCE):
            if not self._worker.tag_probe(tag, mask).matched:
                behind = False
                break
            self._sunk.append(self._worker.tag_recv(self._sink, tag, mask))
            self.dropped += 1
        if behind:
            self._kick()
        if self._sunk:
            self._sunk = [request for request in self._sunk if not request.completed]
        return behind

    def _tick(self) -> None:
        self._timer = None
        self.poll()

    def _kick(self) -> None:
        if not self._kicked:
            self._kicked = True
            self.loop.call_soon(self._run_kick)

    def _run_kick(self) -> None:
        self._kicked = False
        self.poll()

    # -- messages

    @staticmethod
    def next_tag() -> int:
        """Return the first of four million tags for messages that this engine receives.

        The receiver chooses the tags, so a message whose receive was cancelled never matches another one. UCX matches
        by tag alone, not by sender, so tags are random: a peer that knows its own tags cannot predict others.
        """
        return int.from_bytes(os.urandom(8), "little") % ((1 << _TAG_BITS) - _TAGS_PER_REQUEST)

    def _post(self, post: Callable[[Any], Any], endpoint: Endpoint, buffer: npt.NDArray[np.uint8]) -> Operation:
        if self._closed:
            raise DataPlaneClosed("the engine is closed")
        if not endpoint.native.alive:  # UCX would accept it, but never start, end or cancel it (measured)
            raise ConnectionResetError("the UCX connection has ended")
        array = self._array(buffer)
        operation = Operation(self, post(array), endpoint, (buffer, array))
        self._operations[id(operation)] = operation
        self.posted += 1
        return operation

    def send(self, endpoint: Endpoint, tag: int, buffer: npt.NDArray[np.uint8]) -> Operation:
        """Post a send of at most ``MESSAGE_BYTES`` contiguous bytes, which must not change until it has ended."""
        wrapped = self._ucx["Tag"](tag)
        return self._post(lambda array: endpoint.native.tag_send(array, wrapped), endpoint, buffer)

    def receive(self, endpoint: Endpoint, tag: int, buffer: npt.NDArray[np.uint8]) -> Operation:
        """Post a receive of a message with this tag and exactly this length into writable contiguous bytes."""
        if not (buffer.flags.writeable and buffer.flags.c_contiguous):
            raise ValueError("a receive needs writable, contiguous memory")
        wrapped = self._ucx["Tag"](tag)
        mark = b""
        if len(buffer) >= _MARK_BYTES and buffer.dtype == np.uint8:
            mark = self._mark
            buffer[-_MARK_BYTES:] = self._marked
        operation = self._post(lambda array: endpoint.native.tag_recv(array, wrapped), endpoint, buffer)
        operation.mark = mark
        return operation

    def send_token(self, endpoint: Endpoint, buffer: npt.NDArray[np.uint8]) -> Operation:
        """Post the send of the token that authenticates a connection, as its first bytes."""
        return self._post(endpoint.native.stream_send, endpoint, buffer)

    def receive_token(self, endpoint: Endpoint, buffer: npt.NDArray[np.uint8]) -> Operation:
        """Post the receive of the token that authenticates a connection, its first bytes."""
        return self._post(endpoint.native.stream_recv, endpoint, buffer)

    # -- connections

    def _hold(self, native: Any) -> Endpoint:
        endpoint = Endpoint(native, self)
        self._endpoints.add(endpoint)
        return endpoint

    def connect(self, host: str, port: int) -> Endpoint:
        """Start to connect; a failure is raised by the first operation on the connection."""
        if self._closed:
            raise DataPlaneClosed("the engine is closed")
        made = self._ucx["UCXEndpoint"].create(self._worker, host, port, True)  # noqa: FBT003 - errors are reported
        return self._hold(made)

    def listen(self, accept: Callable[[Endpoint], None], port: int = 0, *, drop: bool = False) -> int:
        """Listen on every address of the machine (UCX cannot bind to one); return the port number.

        Args:
            accept: Called with each new connection.
            port: Port number; 0: the system chooses one.
            drop: Whether to drop messages that arrive before their receive was posted.
        """
        self._drops = self._drops or drop
        create = self._ucx["UCXListener"].create
        self._listener = create(self._worker, port, lambda made: accept(self._hold(made)), deliver_endpoint=True)
        self._kick()
        return int(self._listener.port)

    def abandon(self, endpoint: Endpoint) -> None:
        """Close a connection at once; its operations stay pinned until UCX is done with them. Idempotent."""
        if self._closed:
            return
        self._abandoned.update(key for key, operation in self._operations.items() if operation.endpoint is endpoint)
        self._advance()  # without it, UCX nearly always keeps the worker for ever if operations are running (measured)
        endpoint.native.close_blocking(period=10**9, max_attempts=1)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._kick()

    async def drained(self, timeout_s: float = 5.0) -> bool:
        """Wait until all operations have ended; return False where some have not after ``timeout_s`` seconds."""
        until = self.loop.time() + timeout_s
        while self._operations and self.loop.time() < until:
            self.poll()
            await asyncio.sleep(0.001)
        return not self._operations

    async def close(self, timeout_s: float = 5.0) -> None:
        """Abandon all connections, wait until UCX is done with all buffers, and stop. Idempotent.

        Operations that have not ended after ``timeout_s`` seconds stay pinned until the process exits.
        """
        if self._closed:
            return
        self._listener = None
        for endpoint in {op.endpoint for op in self._operations.values() if op.endpoint is not None}:
            self.abandon(endpoint)
        drained = await self.drained(timeout_s)
        self._closed = True
        self.loop.remove_reader(self._fd)
        if self._timer is not None:
            self._timer.cancel()
        if drained:
            self._worker = None

    def end(self, timeout_s: float = 1.0) -> None:
        """Close without the event loop, for example after it was closed; block until UCX is done. Idempotent.

        Operations that have not ended after ``timeout_s`` seconds stay pinned until the process exits.
        """
        if self._closed:
            return
        self._closed, self._listener = True, None
        if not self.loop.is_closed():
            self.loop.remove_reader(self._fd)
        for endpoint in {*self._endpoints, *(op.endpoint for op in self._operations.values())}:
            if endpoint is not None:
                endpoint.native.close_blocking(period=10**9, max_attempts=1)
        until = time.monotonic() + timeout_s
        while not all(op.completed for op in self._operations.values()) and time.monotonic() < until:
            self._worker.progress()
        self._pin([op for op in self._operations.values() if not op.completed])
        never_destroy(self._sunk)
        self._operations.clear()
        self._worker = None

    def __del__(self) -> None:
        """Close an engine that was not closed, so that UCX does not write into memory that is freed with it."""
        if getattr(self, "_fd", None) is not None and not sys.is_finalizing():
            self.end()

    def _pin(self, operations: Iterable[Operation]) -> None:
        """Keep objects that UCX may still use until the process exits."""
        for operation in operations:
            for held in (operation.request, operation.endpoint, operation.keep, self._worker):
                never_destroy(held)

    def after_fork(self) -> None:
        """Close the engine in a forked child: its native objects are the parent's, whose threads the child lacks."""
        self._closed = True
        for held in (self._worker, self._listener, self._sunk):
            never_destroy(held)
        self._pin(self._operations.values())

    @property
    def under_way(self) -> int:
        """Number of sends and receives that have not ended."""
        return len(self._operations)


def _claim(library: Any) -> None:
    """Record, as an attribute of the library, which process uses UCX, so that a forked child can detect it.

    Raises:
        DataPlaneUnsupported: The parent used UCX before the fork, so all connections of this process would time out.
    """
    user, me = getattr(library, _USER, None), os.getpid()
    if user not in (None, me):
        msg = (
            f"process {user} used UCX before this one was forked from it, and UCX does not survive that: "
            "start processes by spawn, or fork before the first use"
        )
        raise DataPlaneUnsupported(msg, capability="fork")
    setattr(library, _USER, me)


def load_ucx() -> None:
    """Load UCX now, which takes half a second; else the first engine does."""
    _load()


def _load() -> dict[str, Any]:
    """Set UCX's environment variables, import ucxx, and return the names used of it."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ucxx  # noqa: F401 - loads UCX itself
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array
        from ucxx.types import Tag
    except ImportError as err:
        msg = f"payload between machines travels over UCX; it needs the extra: pip install 'asyncdp[ucxx]' ({err})"
        raise ImportError(msg) from err
    names = ("UCXContext", "UCXWorker", "UCXEndpoint", "UCXListener", "Feature")
    own = {"libucxx": libucxx, "Array": Array, "Tag": Tag, "TagMask": libucxx.UCXXTagMask}
    return {**own, **{name: getattr(libucxx, name) for name in names}}
