"""A blocking client: the verbs of a data plane for code without an event loop, such as NeMo-RL's.

:func:`build_blocking_client` makes one from the same config as ``build_data_plane_client``. The async client lives on
an event loop in a thread of its own, and each call is handed over to it, so any number of threads may call at once.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import functools
import os
import threading
import warnings
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar, cast

import anyio
from anyio.from_thread import BlockingPortal

from asyncdp.errors import DataPlaneBadRequest, DataPlaneClosed, DataPlaneUnavailable
from asyncdp.process.forks import on_fork_of_loop
from asyncdp.protocol import DataPlaneClient
from asyncdp.settings.names import as_mapping

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    from tensordict import TensorDict

    from asyncdp.batches import Batches
    from asyncdp.client import Client
    from asyncdp.meta import DataPlaneCapabilities, KVBatchMeta
    from asyncdp.metrics.snapshot import Snapshot

__all__ = ["BlockingClient", "build_blocking_client"]

P = ParamSpec("P")
R = TypeVar("R")

#: Seconds that the end of the interpreter waits for a client that was not closed.
EXIT_S = 4.0
#: Seconds between two looks of a loop that ends at whether a thread is handing a call over to it.
HAND_OVER_S = 0.001
#: What the portal of a loop that ends or has ended raises.
ENDED = (RuntimeError, concurrent.futures.CancelledError, asyncio.CancelledError)


class _Loop:
    """The event loop of one client, in a thread that starts with the first call and ends when the client is closed."""

    def __init__(self, client: Client) -> None:
        """Start nothing yet."""
        self.client = client
        self.pid = os.getpid()
        self.ended = False
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._handing_over = 0
        self._portal: BlockingPortal | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._started: concurrent.futures.Future[BlockingPortal] = concurrent.futures.Future()
        self._error: BaseException | None = None

    @property
    def inside(self) -> bool:
        """Whether the caller runs on this loop, where waiting for it would never end."""
        return self._thread is threading.current_thread()

    def portal(self) -> BlockingPortal:
        """Return the way onto the loop, which is started if it is not running.

        Raises:
            DataPlaneClosed: The client was closed.
            DataPlaneUnavailable: The thread or its loop cannot be started; the next call tries again.
        """
        portal = self._portal
        if portal is None:
            with self._lock:
                if self._portal is None and not self.ended:
                    self._start()
                portal = self._portal
        if portal is None or self.ended:
            msg = "the client is closed"
            raise DataPlaneClosed(msg)
        return portal

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        """Keep the loop running while a thread hands a call over to it, also if it is closed meanwhile.

        A portal waits for the loop to take a call. If the loop ended between the portal's look at whether it runs and
        its request, that wait would have no end.
        """
        with self._counting:
            self._handing_over += 1
        try:
            yield
        finally:
            with self._counting:
                self._handing_over -= 1

    def _start(self) -> None:
        thread = self._thread
        if thread is None:  # else an interrupt has ended the wait for its loop
            self._started = concurrent.futures.Future()
            thread = threading.Thread(
                target=self._run, args=(self._started,), name="asyncdp blocking client", daemon=True
            )
            try:
                thread.start()
            except (OSError, RuntimeError, MemoryError) as err:
                raise _not_started(err) from err
            self._thread = thread
            atexit.register(self.end_at_exit)
        error = self._started.exception()
        if error is not None:
            atexit.unregister(self.end_at_exit)
            self._thread = self._loop = self._stop = None
            thread.join()
            raise _not_started(error) from error
        self._portal = self._started.result()

    def _run(self, started: concurrent.futures.Future[BlockingPortal]) -> None:
        """Run the loop; what goes wrong before it has started is raised to the caller that waits for it."""
        try:
            with asyncio.Runner() as runner:
                runner.run(self._serve(started))
        except BaseException as err:
            if started.done():
                raise
            started.set_exception(err)

    async def _serve(self, started: concurrent.futures.Future[BlockingPortal]) -> None:
        """Keep the loop until the client is to be closed; then close it."""
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        on_fork_of_loop(self._loop)
        try:
            async with BlockingPortal() as portal:
                started.set_result(portal)
                await self._stop.wait()
                try:
                    await self.client.close()
                except Exception as err:  # noqa: BLE001 - close() raises it to its caller
                    self._error = err
                await portal.stop(cancel_remaining=True)
        finally:
            while started.done() and self._handing_over:  # noqa: ASYNC110 - other threads count
                await asyncio.sleep(HAND_OVER_S)

    def end(self) -> None:
        """Begin to close the client, from any thread, without waiting. In a forked child it does nothing."""
        if self.pid != os.getpid() or self.ended:
            return
        self.ended = True
        atexit.unregister(self.end_at_exit)
        if self._loop is not None and self._stop is not None:
            try:
                self._loop.call_soon_threadsafe(self._stop.set)
            except RuntimeError:  # the loop has ended
                return

    def close(self) -> None:
        """Close the client, and return when that is done."""
        if self.pid != os.getpid():
            return
        with self._lock:
            never_ran = self._thread is None and not self.ended
            self.end()
        if never_ran and _in_a_loop():
            with concurrent.futures.ThreadPoolExecutor(1) as elsewhere:
                elsewhere.submit(asyncio.run, self.client.close()).result()
        elif never_ran:
            asyncio.run(self.client.close())
        elif self._thread is not None and not self.inside:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def end_at_exit(self) -> None:
        """Close a client that nobody closed, within EXIT_S seconds: its thread must not outlive the interpreter."""
        if self.pid == os.getpid():
            self.end()
            if self._thread is not None:
                self._thread.join(EXIT_S)


def _blocking(verb: Callable[Concatenate[Any, P], Awaitable[R]]) -> Callable[Concatenate[BlockingClient, P], R]:
    """Make a blocking verb of an async one, with its name, arguments, defaults and docstring."""
    name = verb.__name__

    def blocking(self: BlockingClient, /, *args: P.args, **kwargs: P.kwargs) -> R:
        call = getattr(self._loop.client, name)
        return cast("R", self._run(name, functools.partial(call, *args, **kwargs)))

    functools.update_wrapper(blocking, verb)
    return blocking


def _batches(
    verb: Callable[Concatenate[Any, P], AsyncIterator[tuple[KVBatchMeta, TensorDict]]],
) -> Callable[Concatenate[BlockingClient, P], BlockingBatches]:
    """Make the blocking form of ``batches``, with its arguments, defaults and docstring."""

    def batches(self: BlockingClient, /, *args: P.args, **kwargs: P.kwargs) -> BlockingBatches:
        client = cast("Any", self._loop.client)  # the arguments are those of the protocol's verb
        return BlockingBatches(self, client.batches(*args, **kwargs))

    functools.update_wrapper(batches, verb)
    return batches


class BlockingClient:
    """A client whose verbs block until they have their result or raise; made by :func:`build_blocking_client`.

    Its verbs are those of :class:`~asyncdp.DataPlaneClient`, with the same arguments, defaults, results and errors. Any
    number of threads may use it at once. It pickles as its config: unpickled, it attaches to the same plane. It need
    not be closed: its thread ends with the last reference to it, or with the interpreter. In a forked child each verb
    raises DataPlaneBadRequest, and ``close`` does nothing.
    """

    def __init__(self, client: Client, *, nemo: bool = False) -> None:
        """Wrap an async client that nobody else uses."""
        self._loop = _Loop(client)
        self._nemo = nemo
        self._warned = False
        self._finalizer = weakref.finalize(self, self._loop.end)
        self._finalizer.atexit = False  # end_at_exit does that, and waits

    register_partition = _blocking(DataPlaneClient.register_partition)
    claim_meta = _blocking(DataPlaneClient.claim_meta)
    get_data = _blocking(DataPlaneClient.get_data)
    check_consumption_status = _blocking(DataPlaneClient.check_consumption_status)
    put_samples = _blocking(DataPlaneClient.put_samples)
    get_samples = _blocking(DataPlaneClient.get_samples)
    clear_samples = _blocking(DataPlaneClient.clear_samples)
    ping = _blocking(DataPlaneClient.ping)
    list_metadata = _blocking(DataPlaneClient.list_metadata)
    depth = _blocking(DataPlaneClient.depth)
    pop = _blocking(DataPlaneClient.pop)
    evict = _blocking(DataPlaneClient.evict)
    release_claim = _blocking(DataPlaneClient.release_claim)
    list_claims = _blocking(DataPlaneClient.list_claims)
    release_claims = _blocking(DataPlaneClient.release_claims)
    list_partitions = _blocking(DataPlaneClient.list_partitions)
    describe = _blocking(DataPlaneClient.describe)
    list_hosts = _blocking(DataPlaneClient.list_hosts)
    drop_partition = _blocking(DataPlaneClient.drop_partition)
    wait_partition = _blocking(DataPlaneClient.wait_partition)
    batches = _batches(DataPlaneClient.batches)

    def list_sample_ids(self, partition_id: str) -> list[str]:
        """Return the ids of all samples of a partition, sorted; ``[]`` if it does not exist. Reads no payload."""
        try:
            groups = self.list_metadata(partition_id)
        except DataPlaneBadRequest as err:
            if err.field != "partition_id":
                raise
            return []
        return sorted(key for group in groups for key in group.keys)

    def get_capabilities(self) -> DataPlaneCapabilities:
        """Return what the backend guarantees beyond the promises common to all backends."""
        return self._loop.client.get_capabilities()

    def attach_config(self) -> dict[str, Any]:
        """Return the config with which another process attaches to the same plane."""
        return self._loop.client.attach_config()

    def snapshot(self) -> Snapshot:
        """Return what the client has counted."""
        return self._loop.client.snapshot()

    @property
    def owner(self) -> str:
        """Name under which the plane lists what this client puts and claims."""
        return self._loop.client.owner

    def close(self) -> None:
        """Close the client: waiting calls raise DataPlaneClosed. Closing it again, from any thread, does nothing."""
        self._loop.close()

    def __enter__(self) -> Self:
        """Return the client itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client."""
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the config: when unpickled, the client attaches to the same plane."""
        return _restored, (self._loop.client.__reduce__(), self._nemo)

    def _portal(self, verb: str) -> BlockingPortal:
        """Return the way onto the loop, if the caller may block."""
        if self._loop.pid != os.getpid():
            msg = f"this client was made in process {self._loop.pid}; a forked child makes or unpickles one of its own"
            raise DataPlaneBadRequest(msg, op=verb)
        if self._loop.inside or (not self._nemo and _in_a_loop()):
            msg = (
                f"{verb} would block the event loop that runs in this thread; there, use the async client:"
                " asyncdp.build_data_plane_client"
            )
            raise DataPlaneBadRequest(msg, op=verb)
        if self._nemo and not self._warned and _in_a_loop():
            self._warned = True
            text = f"{verb} blocks the event loop that runs in this thread; asyncdp.build_data_plane_client would not"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        return self._loop.portal()

    def _run(self, verb: str, call: Callable[[], Awaitable[R]]) -> R:
        """Have the loop make a call, and wait for its end; an interrupt of the waiting thread cancels it."""
        with self._loop.handing_over():
            portal = self._portal(verb)
            try:
                future = portal.start_task_soon(_awaited, call)
            except RuntimeError as err:  # it was closed between the look and the call
                msg = "the client is closed"
                raise DataPlaneClosed(msg, op=verb) from err
        try:
            return future.result()
        except concurrent.futures.CancelledError as err:
            msg = "the client was closed"
            raise DataPlaneClosed(msg, op=verb) from err
        except BaseException:
            future.cancel()
            raise


class BlockingBatches:
    """An iterator over claimed batches; made by ``client.batches(...)`` of a blocking client.

    Used in a ``with`` statement it releases the claims of batches that the caller did not get when it is left.
    """

    def __init__(self, client: BlockingClient, batches: Batches) -> None:
        """Claim nothing yet."""
        self._client = client
        self._batches = batches
        self._entered: AbstractContextManager[Batches] | None = None

    def __iter__(self) -> Self:
        """Return the iterator itself."""
        return self

    def __next__(self) -> tuple[KVBatchMeta, TensorDict]:
        """Return the next batch."""
        try:
            return self._client._run("batches", self._batches.__anext__)  # noqa: SLF001 - made by it
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Self:
        """Begin to claim and read ahead, if ``prefetch`` is above 0."""
        with self._client._loop.handing_over():  # noqa: SLF001 - made by it
            portal = self._client._portal("batches")  # noqa: SLF001 - made by it
            entered = portal.wrap_async_context_manager(self._batches)
            try:
                entered.__enter__()
            except ENDED as err:
                if not self._client._loop.ended:  # noqa: SLF001 - made by it
                    raise
                msg = "the client is closed"
                raise DataPlaneClosed(msg, op="batches") from err
        self._entered = entered
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End reading ahead, and release what the caller did not get; a client that was closed has done so."""
        entered, self._entered = self._entered, None
        if entered is not None:
            try:
                with self._client._loop.handing_over():  # noqa: SLF001 - made by it
                    entered.__exit__(kind, err, trace)
            except ENDED:
                if not self._client._loop.ended:  # noqa: SLF001 - made by it
                    raise


def build_blocking_client(
    config: Mapping[str, Any],
    *,
    bootstrap: bool = True,
    layers: Sequence[Any] | None = None,
    nemo: bool = False,
) -> BlockingClient:
    """Build a client whose verbs block, for code without an event loop.

    Args:
        config: As for ``build_data_plane_client``.
        bootstrap: Whether to start the plane rather than attach to one that runs.
        layers: User-defined layers, as for ``build_data_plane_client``.
        nemo: Whether the client behaves as NeMo-RL's, as the config's ``nemo`` selects it; and a verb that is called in
            the thread of a running event loop blocks that loop, with one warning, as NeMo-RL's async actors do. If
            False, and the config does not set it, such a call raises DataPlaneBadRequest.

    Raises:
        ValueError, TypeError, ImportError, DataPlaneError: As ``build_data_plane_client``.
    """
    from asyncdp.factory import build_data_plane_client

    given = as_mapping(config)
    if nemo and isinstance(given, Mapping) and given.get("nemo") is None:
        given = {**given, "nemo": True}
    client = build_data_plane_client(given, bootstrap=bootstrap, layers=layers)
    return BlockingClient(client, nemo=nemo or given.get("nemo", False) not in (None, False))


def _not_started(error: BaseException) -> DataPlaneUnavailable:
    """Return what a call raises whose loop could not be started."""
    return DataPlaneUnavailable(f"the client's event loop could not be started: {type(error).__name__}: {error}")


async def _awaited(call: Callable[[], Awaitable[R]]) -> R:
    return await call()


def _in_a_loop() -> bool:
    """Return whether an event loop runs in this thread."""
    try:
        anyio.get_current_task()
    except RuntimeError:
        return False
    return True


def _restored(recipe: tuple[Any, ...], nemo: bool) -> BlockingClient:  # noqa: FBT001 - read from a pickle
    make, arguments = recipe[:2]
    return BlockingClient(make(*arguments), nemo=nemo)
