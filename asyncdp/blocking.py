"""A blocking client: the verbs of a data plane for code without an event loop, such as NeMo-RL's.

:func:`build_blocking_client` makes one from the same config as ``build_data_plane_client``. The async client lives on
an event loop in a thread of its own, and each call is handed over to it, so any number of threads may call at once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import os
import warnings
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar, cast

from asyncdp.errors import DataPlaneBadRequest, DataPlaneClosed
from asyncdp.process.client_loop import ClientLoop, in_a_loop
from asyncdp.protocol import DataPlaneClient
from asyncdp.settings.names import as_mapping

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    from anyio.from_thread import BlockingPortal
    from tensordict import TensorDict

    from asyncdp.batches import Batches
    from asyncdp.client import Client
    from asyncdp.meta import DataPlaneCapabilities, KVBatchMeta
    from asyncdp.metrics.snapshot import Snapshot

__all__ = ["BlockingClient", "build_blocking_client"]

P = ParamSpec("P")
R = TypeVar("R")

#: What the portal of a loop that ends or has ended raises.
ENDED = (RuntimeError, concurrent.futures.CancelledError, asyncio.CancelledError)


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
        self._loop = ClientLoop(client)
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
        if self._loop.inside or (not self._nemo and in_a_loop()):
            msg = (
                f"{verb} would block the event loop that runs in this thread; there, use the async client:"
                " asyncdp.build_data_plane_client"
            )
            raise DataPlaneBadRequest(msg, op=verb)
        if self._nemo and not self._warned and in_a_loop():
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


async def _awaited(call: Callable[[], Awaitable[R]]) -> R:
    return await call()


def _restored(recipe: tuple[Any, ...], nemo: bool) -> BlockingClient:  # noqa: FBT001 - read from a pickle
    make, arguments = recipe[:2]
    return BlockingClient(make(*arguments), nemo=nemo)
