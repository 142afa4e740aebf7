"""Drives UCX from an event loop: no polling while idle, no thread, buffers held until UCX is done with them.

ucxx's own wait spins on the loop: one idle connection costs a whole core. Here the loop watches the worker's file
descriptor, runs progress when it is readable and arms it again. Two rules keep the process alive:

* A request that was given up may still write into its buffer for a while (measured: up to 86 ms); freed memory then
  means a crash. So request, array and buffer are pinned from the post until the request has ended, whatever becomes of
  whoever waited for it.
* A connection on which something was given up is abandoned: the next receive on it would get the old message.

Anybody who reaches a listener of UCX may send messages, tagged as he likes, on behalf of nobody. So tags are drawn at
random for each transfer, and an engine that listens drops what comes without being awaited.

UCX does not survive a fork: in a child the engine is closed, and nothing native of it is ever destroyed, which would
end the child by SIGABRT, or harm its parent.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from asyncdp.errors import DataPlaneClosed, DataPlaneUnsupported
from asyncdp.process.forks import keep_for_ever, on_fork

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["MESSAGE_BYTES", "Endpoint", "Engine", "Operation"]

#: One message at the most: a larger one holds up the loop (256 MB: 5-75 ms) and is not faster.
MESSAGE_BYTES: Final = 16 << 20
#: More than a request can have messages: each needs a few bytes of a frame that has 16 MiB.
_TAGS_PER_REQUEST: Final = 1 << 22
#: Tags have so many bits on the wire.
_TAG_BITS: Final = 62
#: Of messages that nobody awaits, so many are dropped before the loop runs again (9 us each, measured).
_DROPPED_AT_ONCE: Final = 64
#: Read by UCX when it is loaded. put_zcopy: rendezvous on host memory is five times faster than with what ucxx sets.
#: Reuse of addresses: else the port of a killed host stays taken for a minute. Its log: standard output is the
#: program's own (a slot host's readiness line), and that ucxx itself sets variables UCX does not use is no news.
#: Errors only: of each message of a kind that this process does not take UCX would print a page of warnings.
_ENVIRONMENT: Final = {
    "UCX_RNDV_SCHEME": "put_zcopy",
    "UCX_CM_REUSEADDR": "y",
    "UCX_TCP_CM_REUSEADDR": "y",
    "UCX_LOG_FILE": "stderr",
    "UCX_LOG_LEVEL": "error",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
#: Where the library notes which process uses it.
_USER: Final = "asyncdp_user"


class Endpoint:
    """One UCX connection; ``native`` is what ucxx made. It keeps its engine."""

    __slots__ = ("__weakref__", "_engine", "native")

    def __init__(self, native: Any, engine: Engine) -> None:
        """Hold both."""
        self.native = native
        self._engine = engine


class Operation:
    """One send or receive under way.

    Attributes:
        ended: Done when UCX is done with the buffer, well or not.
    """

    __slots__ = ("_engine", "ended", "endpoint", "error", "keep", "request")

    def __init__(self, engine: Engine, request: Any, endpoint: Endpoint, keep: Any) -> None:
        """Pin ``keep`` (the buffer) with the request."""
        self._engine = engine
        self.request: Any = request
        self.endpoint: Endpoint | None = endpoint
        self.keep = keep
        self.error: Exception | None = None
        self.ended: asyncio.Future[None] = engine.loop.create_future()

    @property
    def completed(self) -> bool:
        """Whether UCX is done."""
        return self.request is None or bool(self.request.completed)

    def finish(self) -> None:
        """Let go of everything native: UCX is done."""
        try:
            self.request.check_error()
        except Exception as err:  # noqa: BLE001 - raised to whoever waits
            self.error = err
        self.request = self.endpoint = self.keep = None
        if not self.ended.done():
            self.ended.set_result(None)

    async def wait(self) -> None:
        """Wait until it has ended; spins a little first, since small messages take less than a sleep.

        Raises:
            Exception: UCX's own (``UCXX...Error``).
        """
        until = time.perf_counter() + self._engine.spin_s
        while not self.completed and time.perf_counter() < until:
            self._engine.progress()
            await asyncio.sleep(0)
        if not self.ended.done():
            self._engine.poll()
            await asyncio.shield(self.ended)
        if self.error is not None:
            raise self.error


class Engine:
    """A UCX worker on the running loop; made once per loop.

    Args:
        devices: Network devices that UCX may use, such as ``"lo"`` or ``"mlx5_0:1"``; None: all.
        spin_s: How long a wait spins before it sleeps, in seconds (measured: 50 us halves the time of 1 KB).

    Raises:
        ImportError: ucxx is not installed; the message names the extra.
        DataPlaneUnsupported: This process was forked from one that had used UCX.
    """

    def __init__(self, *, devices: str | None = None, spin_s: float = 50e-6) -> None:
        """Make the worker and watch it."""
        self._ucx = _load()
        _claim(self._ucx["libucxx"])
        self.loop = asyncio.get_running_loop()
        self.spin_s = spin_s
        self.polls = 0
        self.posted = 0
        self._array: Callable[[Any], Any] = self._ucx["Array"]
        config = {"NET_DEVICES": devices} if devices else {}
        # Not all that ucxx would take: active messages that nobody awaits are kept for ever, and a peer's remote memory
        # access reads and writes any address of this process, unasked, where UCX does it in software.
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
        self._sink = self._array(np.empty(1, np.uint8))
        self._sunk: list[Any] = []
        self._worker.init_blocking_progress_mode()
        self._fd = self._worker.epoll_file_descriptor
        self.loop.add_reader(self._fd, self._readable)
        on_fork(self)
        self._kick()

    # -- the loop

    def progress(self) -> None:
        """Let UCX do one step."""
        if not self._closed:
            self._worker.progress_once()

    def _readable(self) -> None:
        self.polls += 1
        self.poll()

    def poll(self) -> None:
        """Let UCX work, note what has ended, and make its descriptor tell of the next event."""
        if self._closed:
            return
        self._advance()
        if self._drops:
            self._drop_unexpected()
        for key, operation in list(self._operations.items()):
            if operation.completed:
                del self._operations[key]
                operation.finish()
        if not self._kicked and not self._worker.arm():
            self._kick()  # something happened meanwhile
        if self._operations and self._timer is None:
            wait_s = 0.005 if self._abandoned else 0.05
            self._timer = self.loop.call_later(wait_s, self._tick)
        if not self._operations:
            self._abandoned.clear()

    def _advance(self) -> None:
        """Let UCX do what it can do now; bounded, for a large transfer must not starve the loop."""
        for _ in range(64):
            if not self._worker.progress_once():
                self._worker.progress()  # progress_once alone never runs the cancels that a dead peer schedules
                return
        self._kick()

    def _drop_unexpected(self) -> None:
        """Take messages that nobody awaits off UCX's hands: it would keep each of them as long as the worker lives."""
        tag, mask = self._ucx["Tag"](0), self._ucx["TagMask"](0)
        for _ in range(_DROPPED_AT_ONCE):
            if not self._worker.tag_probe(tag, mask).matched:
                break
            self._sunk.append(self._worker.tag_recv(self._sink, tag, mask))
            self.dropped += 1
        else:
            self._kick()
        if self._sunk:
            self._sunk = [request for request in self._sunk if not request.completed]

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

        The receiver picks them, so a message that nobody waits for any more never matches another receive. UCX matches
        by tag alone, whoever sends: they are drawn at random, so that who was given one cannot foretell another's.
        """
        return secrets.randbelow((1 << _TAG_BITS) - _TAGS_PER_REQUEST)

    def _post(self, post: Callable[[Any], Any], endpoint: Endpoint, buffer: npt.NDArray[np.uint8]) -> Operation:
        if self._closed:
            raise DataPlaneClosed("the engine is closed")
        if not endpoint.native.alive:  # UCX would take it, and neither begin nor end nor cancel it (measured)
            raise ConnectionResetError("the UCX connection has ended")
        array = self._array(buffer)
        operation = Operation(self, post(array), endpoint, (buffer, array))
        self._operations[id(operation)] = operation
        self.posted += 1
        return operation

    def send(self, endpoint: Endpoint, tag: int, buffer: npt.NDArray[np.uint8]) -> Operation:
        """Post a send of contiguous bytes, at most ``MESSAGE_BYTES``; they must not change until it has ended."""
        wrapped = self._ucx["Tag"](tag)
        return self._post(lambda array: endpoint.native.tag_send(array, wrapped), endpoint, buffer)

    def receive(self, endpoint: Endpoint, tag: int, buffer: npt.NDArray[np.uint8]) -> Operation:
        """Post a receive of a message of this tag and of just this length, into writable contiguous bytes."""
        if not (buffer.flags.writeable and buffer.flags.c_contiguous):
            raise ValueError("a receive needs writable, contiguous memory")
        wrapped = self._ucx["Tag"](tag)
        return self._post(lambda array: endpoint.native.tag_recv(array, wrapped), endpoint, buffer)

    def send_token(self, endpoint: Endpoint, buffer: npt.NDArray[np.uint8]) -> Operation:
        """Post the first bytes of a connection, which say whose it is."""
        return self._post(endpoint.native.stream_send, endpoint, buffer)

    def receive_token(self, endpoint: Endpoint, buffer: npt.NDArray[np.uint8]) -> Operation:
        """Post the receive of the first bytes of a connection."""
        return self._post(endpoint.native.stream_recv, endpoint, buffer)

    # -- connections

    def _hold(self, native: Any) -> Endpoint:
        endpoint = Endpoint(native, self)
        self._endpoints.add(endpoint)
        return endpoint

    def connect(self, host: str, port: int) -> Endpoint:
        """Begin a connection; whether it came about shows in the first operation on it."""
        if self._closed:
            raise DataPlaneClosed("the engine is closed")
        made = self._ucx["UCXEndpoint"].create(self._worker, host, port, True)  # noqa: FBT003 - errors are reported
        return self._hold(made)

    def listen(self, accept: Callable[[Endpoint], None], port: int = 0, *, drop: bool = False) -> int:
        """Listen on every address of the machine (UCX cannot bind to one); returns the port.

        Args:
            accept: Gets each new connection.
            port: Where; 0: the system chooses.
            drop: Whether messages are dropped whose receive was not posted before they came.
        """
        self._drops = self._drops or drop
        create = self._ucx["UCXListener"].create
        self._listener = create(self._worker, port, lambda made: accept(self._hold(made)), deliver_endpoint=True)
        self._kick()
        return int(self._listener.port)

    def abandon(self, endpoint: Endpoint) -> None:
        """End a connection at once; what is under way on it stays pinned until UCX is done. Twice is fine."""
        if self._closed:
            return
        self._abandoned.update(key for key, operation in self._operations.items() if operation.endpoint is endpoint)
        self._advance()  # else UCX keeps the worker for ever, nearly each time that something is under way (measured)
        endpoint.native.close_blocking(period=10**9, max_attempts=1)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._kick()

    async def drained(self, timeout_s: float = 5.0) -> bool:
        """Wait until nothing is under way; False where something is after ``timeout_s`` seconds."""
        until = self.loop.time() + timeout_s
        while self._operations and self.loop.time() < until:
            self.poll()
            await asyncio.sleep(0.001)
        return not self._operations

    async def close(self, timeout_s: float = 5.0) -> None:
        """Abandon all connections, wait until UCX is done with all buffers, and stop. Twice is fine.

        What is not done after ``timeout_s`` seconds stays pinned for the life of the process.
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
        """Close without the loop's help, which is closed already: blocks while UCX is not done. Twice is fine.

        What is not done after ``timeout_s`` seconds stays pinned for the life of the process.
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
        keep_for_ever(self._sunk)
        self._operations.clear()
        self._worker = None

    def __del__(self) -> None:
        """End in order, though nobody closed it: UCX must not write into memory that is freed with its engine."""
        if getattr(self, "_fd", None) is not None and not sys.is_finalizing():
            self.end()

    def _pin(self, operations: Iterable[Operation]) -> None:
        """Keep what UCX may still use for the life of the process."""
        for operation in operations:
            for held in (operation.request, operation.endpoint, operation.keep, self._worker):
                keep_for_ever(held)

    def after_fork(self) -> None:
        """Be closed: what is native is the parent's, and its threads do not exist here."""
        self._closed = True
        for held in (self._worker, self._listener, self._sunk, *(one.native for one in self._endpoints)):
            keep_for_ever(held)
        self._pin(self._operations.values())

    @property
    def under_way(self) -> int:
        """How many sends and receives are under way."""
        return len(self._operations)


def _claim(library: Any) -> None:
    """Note which process uses UCX; with the library, whose state it is, so that a forked child finds it.

    Raises:
        DataPlaneUnsupported: Another one did, before this was forked from it: connects here would all time out.
    """
    user, me = getattr(library, _USER, None), os.getpid()
    if user not in (None, me):
        msg = (
            f"process {user} used UCX before this one was forked from it, and UCX does not survive that: "
            "start processes by spawn, or fork before the first use"
        )
        raise DataPlaneUnsupported(msg, capability="fork")
    setattr(library, _USER, me)


def _load() -> dict[str, Any]:
    """Load ucxx, with the settings that it has to find in the environment."""
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
