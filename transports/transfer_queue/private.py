"""All that this transport uses of TransferQueue beyond its documented interface, and the test that it is there.

Documented: ``async_get_meta``, ``async_kv_retrieve_meta``, ``register_sampler``, ``BaseSampler``. Not documented, and
used here only: the storage manager's requests to one storage unit (its public ones route by index, stop at the first
unit that fails, and only log where a clear fails), and the environment variables that TransferQueue reads at import.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncdp.errors import (
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    DataPlaneUnsupported,
    DataPlaneWriteError,
    StaleSlotError,
)

if TYPE_CHECKING:
    from asyncdp.transports.transfer_queue.endpoints import Endpoints

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

#: What is used, by class: (module, class, {method: parameters that must be there}).
_USED: tuple[tuple[str, str, Mapping[str, tuple[str, ...]]], ...] = (
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
        {
            "async_get_meta": ("data_fields", "batch_size", "partition_id", "mode", "task_name", "sampling_config"),
            "async_kv_retrieve_meta": ("keys", "partition_id", "create"),
            "initialize_storage_manager": ("manager_type", "config"),
            "close": (),
        },
    ),
    ("transfer_queue.utils.zmq_utils", "ZMQServerInfo", {"__init__": ("role", "id", "ip", "ports")}),
)


def prepare_environment(unit_timeout_s: int) -> None:
    """Set TransferQueue's own knobs, which it reads once, when it is imported; what the user set stays."""
    if "transfer_queue" in sys.modules:
        return
    os.environ.setdefault("TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT", str(unit_timeout_s))
    os.environ.setdefault("TQ_SIMPLE_STORAGE_MAX_ATTEMPTS", "1")
    os.environ.setdefault("TQ_STORAGE_HANDSHAKE_TIMEOUT", "10")
    os.environ.setdefault("TQ_SOCKET_POOL_SIZE", "16")  # four calls that hang would starve the fifth
    os.environ.setdefault("TQ_NUM_THREADS", str(min(8, os.cpu_count() or 1)))  # more than cores: a warning per call


def self_test() -> list[str]:
    """Return what is missing of what is used, in words; empty where all is well."""
    missing = []
    for module, name, methods in _USED:
        try:
            kind = getattr(__import__(module, fromlist=[name]), name)
        except (ImportError, AttributeError) as err:
            missing.append(f"{module}.{name} ({err})")
            continue
        for method, wanted in methods.items():
            try:
                there = inspect.signature(inspect.unwrap(getattr(kind, method))).parameters
            except AttributeError:
                missing.append(f"{name}.{method}")
                continue
            missing.extend(f"{name}.{method}({parameter})" for parameter in wanted if parameter not in there)
    return missing


class Client:
    """TransferQueue's own asyncio client, reduced to what the transport asks of it.

    Raises:
        DataPlaneUnsupported: This release of TransferQueue lacks something that is used.
        DataPlaneUnavailable: The controller did not answer TransferQueue's handshake.
    """

    def __init__(self, client_id: str, endpoints: Endpoints) -> None:
        """Connect; blocks for a handshake (9 ms), so that it is called in a thread."""
        lacking = self_test()
        if lacking:
            msg = f"this release of TransferQueue lacks {', '.join(lacking)}; asyncdp is made for 0.1.11"
            raise DataPlaneUnsupported(msg, capability=lacking[0])
        from transfer_queue.client import AsyncTransferQueueClient
        from transfer_queue.utils.enum_utils import Role
        from transfer_queue.utils.zmq_utils import ZMQServerInfo

        at = endpoints.controller
        controller = ZMQServerInfo(Role.CONTROLLER, at.id, at.ip, dict(at.ports))
        units = {one.id: ZMQServerInfo(Role.STORAGE, one.id, one.ip, dict(one.ports)) for one in endpoints.units}
        # Its default of eight I/O threads is for fleets; one serves a gigabyte a second.
        self._client = AsyncTransferQueueClient(client_id, controller, zmq_io_threads=2)
        try:
            self._client.initialize_storage_manager("SimpleStorage", {"zmq_info": units})
        except Exception as err:
            self._client.close()
            msg = f"the controller at {at.ip} did not answer the handshake"
            raise DataPlaneUnavailable(msg, host=at.id, cause=err) from err
        self._units = self._client.storage_manager

    @property
    def context(self) -> Any:
        """The ZMQ context of all its sockets."""
        return self._client.zmq_context

    async def reserve(self, partition_id: str) -> None:
        """Make the reserved partition, if it is not there."""
        await self._client.async_kv_retrieve_meta(keys=["directory"], partition_id=partition_id, create=True)

    async def request(self, partition_id: str, argument: str, payload: bytes) -> bytes | None:
        """Have the sampler answer a request; None where another sampler is there, or the partition is not."""
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
        try:
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
        await self._units._clear_single_storage_unit(list(keys), target_storage_unit=unit)  # noqa: SLF001

    def close(self) -> None:
        """Close all sockets and threads; no request may be under way."""
        self._client.close()


def _write_error(err: RuntimeError, unit: str) -> DataPlaneError:
    if type(err).__name__ == "StorageUnitTimeout":
        return DataPlaneTimeout(str(err), host=unit, cause=err)
    if "Storage capacity exceeded" in str(err):
        return DataPlaneNotReady(f"storage unit {unit} is full", host=unit, retry_after_s=0.05, cause=err)
    return DataPlaneWriteError(str(err), host=unit, cause=err)
