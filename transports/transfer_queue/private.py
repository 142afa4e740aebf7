"""Everything that this transport uses of TransferQueue's undocumented interface, and a test that it is present.

If a release lacks some of it, documented calls are used instead (public.py, directory_server.py), with a warning.

Documented: ``async_get_meta``, ``async_kv_retrieve_meta``, ``register_sampler``, ``BaseSampler``. Not documented, and
used here only: the storage manager's requests to one storage unit (its public ones route by index, stop at the first
unit that fails, and only log where a clear fails), and the environment variables that TransferQueue reads at import.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from errno import ENOTSOCK
from typing import TYPE_CHECKING, Any

from zmq.constants import SocketOption
from zmq.error import ZMQError

from asyncdp.errors import (
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    DataPlaneUnsupported,
    DataPlaneWriteError,
    StaleSlotError,
)
from asyncdp.process.forks import replace_by_never_readable

from .public import PublicUnits

if TYPE_CHECKING:
    from .endpoints import Endpoints
    from .mooncake.store import Store

__all__ = ["ERROR_TABLE", "Client", "prepare_environment", "self_test"]

#: Raw exceptions that may still reach the layers, by class name, and the errors that they become.
ERROR_TABLE = (
    ("StorageUnitTimeout", DataPlaneTimeout),
    ("StorageKeyNotFoundError", StaleSlotError),
    ("Again", DataPlaneTimeout),
    ("ContextTerminated", DataPlaneUnavailable),
    ("ZMQError", DataPlaneUnavailable),
    ("ZMQMessageDecodeError", DataPlaneUnavailable),
    ("RayActorError", DataPlaneUnavailable),
    ("ActorDiedError", DataPlaneUnavailable),
    ("GetTimeoutError", DataPlaneTimeout),
    ("RaySystemError", DataPlaneUnavailable),
)

Used = tuple[tuple[str, str, Mapping[str, tuple[str, ...]]], ...]

#: Required interface without a fallback, all of it public: (module, class, {method: required parameters}).
_NEEDED: Used = (
    (
        "transfer_queue.client",
        "AsyncTransferQueueClient",
        {
            "async_kv_retrieve_meta": ("keys", "partition_id", "create"),
            "initialize_storage_manager": ("manager_type", "config"),
            "close": (),
        },
    ),
)
#: Interface that has a fallback, see :func:`self_test`; private except for ``async_get_meta``.
_USED: Used = (
    (
        "transfer_queue.storage.managers.simple_storage_manager",
        "AsyncSimpleStorageManager",
        {
            "_put_to_single_storage_unit": ("global_indexes", "storage_data", "target_storage_unit"),
            "_get_from_single_storage_unit": ("global_indexes", "fields", "target_storage_unit"),
            "_clear_single_storage_unit": ("global_indexes", "target_storage_unit"),
        },
    ),
    (
        "transfer_queue.client",
        "AsyncTransferQueueClient",
        {"async_get_meta": ("data_fields", "batch_size", "partition_id", "mode", "task_name", "sampling_config")},
    ),
    ("transfer_queue.utils.zmq_utils", "ZMQServerInfo", {"__init__": ("role", "id", "ip", "ports")}),
)

PUT, GET, CLEAR = tuple(_USED[0][2])
META, INFO = "async_get_meta", "ZMQServerInfo"

#: Key in the reserved partition under which the address of a directory beside the controller is published.
BESIDE = "asyncdp_directory"


def prepare_environment(unit_timeout_s: int) -> None:
    """Set environment variables that TransferQueue reads at import; values that the user set are kept."""
    if "transfer_queue" in sys.modules:
        return
    os.environ.setdefault("TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT", str(unit_timeout_s))
    os.environ.setdefault("TQ_SIMPLE_STORAGE_MAX_ATTEMPTS", "1")
    os.environ.setdefault("TQ_STORAGE_HANDSHAKE_TIMEOUT", "10")
    os.environ.setdefault("TQ_SOCKET_POOL_SIZE", "16")  # with four sockets, four hanging calls would block a fifth
    # More threads than cores would cause a warning on each call.
    os.environ.setdefault("TQ_NUM_THREADS", str(min(8, os.cpu_count() or 1)))


def self_test(used: Used | None = None) -> dict[str, str]:
    """Return descriptions of what this release lacks, by the name of the call, or of the class if that is missing.

    Each has a fallback in public calls: for requests to one storage unit, ``put_data``, ``get_data`` and ``clear_data``
    of a storage manager for that unit alone; for ``async_get_meta``, a directory beside the controller; for
    ``ZMQServerInfo``, the descriptions that the actors return through Ray.
    """
    missing: dict[str, str] = {}
    for module, name, methods in _USED if used is None else used:
        try:
            kind = getattr(__import__(module, fromlist=[name]), name)
        except (ImportError, AttributeError) as err:
            missing.update({method if method != "__init__" else name: f"{name} ({err})" for method in methods})
            continue
        for method, wanted in methods.items():
            called = name if method == "__init__" else method
            try:
                there = inspect.signature(inspect.unwrap(getattr(kind, method))).parameters
            except AttributeError:
                missing[called] = f"{name}.{method}"
                continue
            lacking = [parameter for parameter in wanted if parameter not in there]
            if lacking:
                missing[called] = f"{name}.{method}({', '.join(lacking)})"
    return missing


class Client:
    """Wraps TransferQueue's asyncio client with the few operations that the transport needs.

    Args:
        client_id: Id of the client towards the servers.
        endpoints: Addresses of the servers.
        infos: Asks Ray for TransferQueue's descriptions of its servers by id; used if they cannot be created locally.
        store: Connects to Mooncake, if its segments hold the rows; blocks.

    Attributes:
        missing: Result of :func:`self_test`: what this release lacks, and what public calls therefore replace.

    Raises:
        DataPlaneUnsupported: This release of TransferQueue lacks something that has no fallback.
        DataPlaneUnavailable: The controller did not answer TransferQueue's handshake.
    """

    def __init__(
        self,
        client_id: str,
        endpoints: Endpoints,
        infos: Callable[[], Mapping[str, Any]] | None = None,
        store: Callable[[], Store] | None = None,
    ) -> None:
        """Connect; blocks for a handshake (9 ms) and should be called in a thread."""
        lacking = list(self_test(_NEEDED).values())
        self.missing = self_test()
        if INFO in self.missing and infos is None:
            lacking.append(self.missing[INFO])
        if lacking:
            msg = f"this release of TransferQueue lacks {', '.join(lacking)}; asyncdp is made for 0.1.11"
            raise DataPlaneUnsupported(msg, capability=lacking[0])
        from transfer_queue.client import AsyncTransferQueueClient

        told = _described(endpoints) if infos is None or INFO not in self.missing else infos()
        controller = told[endpoints.controller.id]
        units = {one.id: told[one.id] for one in endpoints.units}

        def connect(name: str, served: dict[str, Any]) -> Any:
            # The default of eight I/O threads is for large clusters; one thread serves a gigabyte per second.
            made = AsyncTransferQueueClient(name, controller, zmq_io_threads=2)
            try:
                made.initialize_storage_manager("SimpleStorage", {"zmq_info": served})
            except Exception as err:
                made.close()
                msg = f"the controller at {endpoints.controller.ip} did not answer the handshake"
                raise DataPlaneUnavailable(msg, host=endpoints.controller.id, cause=err) from err
            return made

        self._client = connect(client_id, units)
        self._units = self._client.storage_manager
        self._public: PublicUnits | None = None
        self._servers = {one.id: one for one in endpoints.units}
        self._store: Store | None = None
        if store is not None:
            try:
                self._store = store()
            except BaseException:
                self._client.close()
                raise
        elif not self.missing.keys().isdisjoint((PUT, GET, CLEAR)):
            try:
                self._public = PublicUnits(client_id, units, connect)
            except BaseException:
                self._client.close()
                raise

    @property
    def context(self) -> Any:
        """The ZMQ context of all its sockets."""
        return self._client.zmq_context

    async def reserve(self, partition_id: str) -> None:
        """Create the reserved partition if it does not exist."""
        await self._client.async_kv_retrieve_meta(keys=["directory"], partition_id=partition_id, create=True)

    async def find_directory(self, partition_id: str) -> dict[str, Any] | None:
        """Return the published address of a plane's directory; None if it does not run beside the controller."""
        meta = await self._client.async_kv_retrieve_meta(keys=["directory"], partition_id=partition_id, create=False)
        found: dict[str, Any] | None = meta.custom_meta[0].get(BESIDE) if meta.size else None
        return found

    async def publish_directory(self, partition_id: str, where: dict[str, Any]) -> None:
        """Publish the address of a plane's directory on the controller."""
        meta = await self._client.async_kv_retrieve_meta(keys=["directory"], partition_id=partition_id, create=True)
        meta.update_custom_meta([{BESIDE: where}])
        await self._client.async_set_custom_meta(meta)

    async def request(self, partition_id: str, argument: str, payload: bytes) -> bytes | None:
        """Have the sampler answer a request; None if the sampler is not ours or the partition does not exist."""
        if META in self.missing:
            return None
        meta = await self._client.async_get_meta(
            data_fields=[argument],  # no field has this name, so that the controller scans nothing
            batch_size=0,
            partition_id=partition_id,
            mode="fetch",
            task_name=argument,
            sampling_config={argument: payload},
        )
        if not meta.size:
            return None
        answer: bytes | None = meta.custom_meta[0].get(argument)
        return answer

    async def put(self, unit: str, keys: Sequence[int], values: Mapping[str, Sequence[Any]]) -> None:
        """Store one value per field and key."""
        if self._store is not None:
            await self._store.in_a_thread(self._store.put, self._servers[unit], keys, values)
            return
        try:
            if self._public is not None and PUT in self.missing:
                await self._public.put(unit, keys, values)
                return
            await self._units._put_to_single_storage_unit(  # noqa: SLF001 - see the module's text
                list(keys), dict(values), target_storage_unit=unit
            )
        except RuntimeError as err:
            raise _write_error(err, unit) from err

    async def get(self, unit: str, keys: Sequence[int], fields: Sequence[str]) -> Mapping[str, Sequence[Any]]:
        """Return the values of fields by key.

        Raises:
            StaleSlotError: The unit does not have one of the keys or fields.
        """
        values: Any
        if self._store is not None:
            return await self._store.in_a_thread(self._store.get, self._servers[unit], keys, fields)
        try:
            if self._public is not None and GET in self.missing:
                return await self._public.get(unit, keys, fields)
            _, values = await self._units._get_from_single_storage_unit(  # noqa: SLF001
                list(keys), list(fields), target_storage_unit=unit
            )
        except KeyError as err:
            msg = "the storage unit does not hold these rows any more"
            raise StaleSlotError(msg, host=unit, cause=err) from err
        except RuntimeError as err:
            if "get_data: field" in str(err):  # the unit holds no row of this field any more
                msg = "the storage unit does not hold this field any more"
                raise StaleSlotError(msg, host=unit, cause=err) from err
            if type(err).__name__ == "StorageUnitTimeout":
                raise DataPlaneTimeout(str(err), host=unit, cause=err) from err
            raise
        found: Mapping[str, Sequence[Any]] = values
        return found

    async def clear(self, unit: str, keys: Sequence[int]) -> None:
        """Remove keys and their values."""
        if self._store is not None:
            await self._store.in_a_thread(self._store.clear, self._servers[unit], keys)
            return
        if self._public is not None and CLEAR in self.missing:
            await self._public.clear(unit, keys)
            return
        await self._units._clear_single_storage_unit(list(keys), target_storage_unit=unit)  # noqa: SLF001

    def after_fork(self) -> None:
        """Cancel TransferQueue's finalizer, which would hang in a forked child, and disable all sockets.

        In a child, libzmq answers every poll with EINTR, and pyzmq retries for ever.
        """
        finalizer = getattr(self._client, "_finalizer", None)
        if finalizer is not None:
            finalizer.detach()
        for socket in list(self.context._sockets):  # noqa: SLF001 - nobody else knows of those of calls under way
            replace_by_never_readable(socket.get(SocketOption.FD))
            if hasattr(socket, "_shadow_sock"):
                socket._shadow_sock = _Closed()  # noqa: SLF001 - close() does nothing in a child, nor does it say so

    def close(self) -> None:
        """Close all sockets and threads; no request may be in flight."""
        if self._public is not None:
            self._public.close()
        if self._store is not None:
            self._store.close()
        self._client.close()


class _Closed:
    """Replaces the inner socket of pyzmq's asyncio sockets when it must not be used any more."""

    closed = True

    def __getattr__(self, name: str) -> Any:
        raise ZMQError(ENOTSOCK)


def _described(endpoints: Endpoints) -> dict[str, Any]:
    """Create TransferQueue's descriptions of its servers, by id."""
    from transfer_queue.utils.enum_utils import Role
    from transfer_queue.utils.zmq_utils import ZMQServerInfo

    at = endpoints.controller
    told = {at.id: ZMQServerInfo(Role.CONTROLLER, at.id, at.ip, dict(at.ports))}
    told.update({one.id: ZMQServerInfo(Role.STORAGE, one.id, one.ip, dict(one.ports)) for one in endpoints.units})
    return told


def _write_error(err: RuntimeError, unit: str) -> DataPlaneError:
    if type(err).__name__ == "StorageUnitTimeout":
        return DataPlaneTimeout(str(err), host=unit, cause=err)
    if "Storage capacity exceeded" in str(err):
        return DataPlaneNotReady(f"storage unit {unit} is full", host=unit, retry_after_s=0.05, cause=err)
    return DataPlaneWriteError(str(err), host=unit, cause=err)
