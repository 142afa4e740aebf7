"""All that this transport uses of TransferQueue beyond its documented interface, and the test that it is there.

What a release lacks is served by documented calls instead (public.py, directory_server.py), with a warning.

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
from asyncdp.process.forks import silence

from .public import PublicUnits

if TYPE_CHECKING:
    from .endpoints import Endpoints

__all__ = ["ERROR_TABLE", "Client", "prepare_environment", "self_test"]

#: Raw exceptions that may still reach the layers, by class name.
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

#: What there is no other way for, by class: (module, class, {method: parameters that must be there}). All public.
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
#: What has a fallback, see :func:`self_test`. Private, but for async_get_meta.
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

#: Under which name the reserved partition tells where a directory beside the controller listens.
BESIDE = "asyncdp_directory"


def prepare_environment(unit_timeout_s: int) -> None:
    """Set TransferQueue's own knobs, which it reads once, when it is imported; what the user set stays."""
    if "transfer_queue" in sys.modules:
        return
    os.environ.setdefault("TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT", str(unit_timeout_s))
    os.environ.setdefault("TQ_SIMPLE_STORAGE_MAX_ATTEMPTS", "1")
    os.environ.setdefault("TQ_STORAGE_HANDSHAKE_TIMEOUT", "10")
    os.environ.setdefault("TQ_SOCKET_POOL_SIZE", "16")  # four calls that hang would starve the fifth
    os.environ.setdefault("TQ_NUM_THREADS", str(min(8, os.cpu_count() or 1)))  # more than cores: a warning per call


def self_test(used: Used | None = None) -> dict[str, str]:
    """Return what is missing of what is used, by the name of the call (of the class, where that is gone), in words.

    Each has a fallback in the public calls: the requests to one storage unit in ``put_data``, ``get_data`` and
    ``clear_data`` of a storage manager of that unit's own; ``async_get_meta`` in a directory beside the controller;
    ``ZMQServerInfo`` in what the actors themselves say through Ray.
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
    """TransferQueue's own asyncio client, reduced to what the transport asks of it.

    Args:
        client_id: What the servers call it.
        endpoints: Where they are.
        infos: Asks Ray for TransferQueue's own descriptions of its servers by id; only where they cannot be made here.

    Attributes:
        missing: What this release lacks, by call: see :func:`self_test`. Served by the public calls instead.

    Raises:
        DataPlaneUnsupported: This release of TransferQueue lacks something that nothing can stand in for.
        DataPlaneUnavailable: The controller did not answer TransferQueue's handshake.
    """

    def __init__(
        self, client_id: str, endpoints: Endpoints, infos: Callable[[], Mapping[str, Any]] | None = None
    ) -> None:
        """Connect; blocks for a handshake (9 ms), so that it is called in a thread."""
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
            # Its default of eight I/O threads is for fleets; one serves a gigabyte a second.
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
        if not self.missing.keys().isdisjoint((PUT, GET, CLEAR)):
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
        """Make the reserved partition, if it is not there."""
        await self._client.async_kv_retrieve_meta(keys=["directory"], partition_id=partition_id, create=True)

    async def find_directory(self, partition_id: str) -> dict[str, Any] | None:
        """Return where the directory of a plane listens, if it runs beside the controller."""
        meta = await self._client.async_kv_retrieve_meta(keys=["directory"], partition_id=partition_id, create=False)
        found: dict[str, Any] | None = meta.custom_meta[0].get(BESIDE) if meta.size else None
        return found

    async def publish_directory(self, partition_id: str, where: dict[str, Any]) -> None:
        """Have the controller tell everybody where the directory of a plane listens."""
        meta = await self._client.async_kv_retrieve_meta(keys=["directory"], partition_id=partition_id, create=True)
        meta.update_custom_meta([{BESIDE: where}])
        await self._client.async_set_custom_meta(meta)

    async def request(self, partition_id: str, argument: str, payload: bytes) -> bytes | None:
        """Have the sampler answer a request; None where another sampler is there, or the partition is not."""
        if META in self.missing:
            return None
        meta = await self._client.async_get_meta(
            data_fields=[argument],  # no such field: the controller has nothing to scan
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
            StaleSlotError: A key or field is not there.
        """
        values: Any
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
            if "get_data: field" in str(err):  # no row of this field is left in the unit
                msg = "the storage unit does not hold this field any more"
                raise StaleSlotError(msg, host=unit, cause=err) from err
            if type(err).__name__ == "StorageUnitTimeout":
                raise DataPlaneTimeout(str(err), host=unit, cause=err) from err
            raise
        found: Mapping[str, Sequence[Any]] = values
        return found

    async def clear(self, unit: str, keys: Sequence[int]) -> None:
        """Forget keys."""
        if self._public is not None and CLEAR in self.missing:
            await self._public.clear(unit, keys)
            return
        await self._units._clear_single_storage_unit(list(keys), target_storage_unit=unit)  # noqa: SLF001

    def after_fork(self) -> None:
        """Call TransferQueue's own finalizer off, which would wait for ever in a child, and make all sockets dead.

        In a child libzmq says EINTR to all that looks for news, and pyzmq asks again, without an end.
        """
        finalizer = getattr(self._client, "_finalizer", None)
        if finalizer is not None:
            finalizer.detach()
        for socket in list(self.context._sockets):  # noqa: SLF001 - nobody else knows of those of calls under way
            silence(socket.get(SocketOption.FD))
            if hasattr(socket, "_shadow_sock"):
                socket._shadow_sock = _Closed()  # noqa: SLF001 - close() does nothing in a child, nor does it say so

    def close(self) -> None:
        """Close all sockets and threads; no request may be under way."""
        if self._public is not None:
            self._public.close()
        self._client.close()


class _Closed:
    """Stands for the socket within one of pyzmq's for asyncio that may not be touched any more."""

    closed = True

    def __getattr__(self, name: str) -> Any:
        raise ZMQError(ENOTSOCK)


def _described(endpoints: Endpoints) -> dict[str, Any]:
    """Return TransferQueue's own descriptions of its servers, by id."""
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
