"""TransferQueue's classes as another release might have them: one call is not where this one has it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from asyncdp.transports.transfer_queue.private import CLEAR, GET, INFO, META, PUT

__all__ = ["CALLS", "release_without"]

#: Every call that has a fallback.
CALLS = (PUT, GET, CLEAR, META, INFO)


@contextmanager
def release_without(*calls: str) -> Iterator[None]:
    """Take calls away from TransferQueue in this process; what is built upon them still works, under other names."""
    with pytest.MonkeyPatch.context() as patch:
        units = [call for call in calls if call in (PUT, GET, CLEAR)]
        if units:
            _rename(patch, units)
        if META in calls:
            _drop_sampling_config(patch)
        if INFO in calls:
            _rename_server_info(patch)
        yield


def _rename(patch: pytest.MonkeyPatch, calls: list[str]) -> None:
    """Compile the storage manager anew, with other names for its private methods."""
    from transfer_queue.storage.managers import simple_storage_manager as module
    from transfer_queue.storage.managers.base import StorageManagerFactory

    before = module.AsyncSimpleStorageManager
    source = inspect.getsource(before)
    for call in calls:
        source = source.replace(call, f"_moved{call}")
    patch.setattr(module, "AsyncSimpleStorageManager", before)  # both come back at the end
    patch.setitem(StorageManagerFactory._registry, "SimpleStorage", before)
    exec(compile(source, module.__file__, "exec"), vars(module))
    assert not any(hasattr(module.AsyncSimpleStorageManager, call) for call in calls)


def _drop_sampling_config(patch: pytest.MonkeyPatch) -> None:
    from transfer_queue.client import AsyncTransferQueueClient

    whole = AsyncTransferQueueClient.async_get_meta

    async def async_get_meta(
        self: Any, data_fields: Any, batch_size: Any, partition_id: Any, mode: Any = "fetch", task_name: Any = None
    ) -> Any:
        return await whole(self, data_fields, batch_size, partition_id, mode, task_name)

    patch.setattr(AsyncTransferQueueClient, "async_get_meta", async_get_meta)


def _rename_server_info(patch: pytest.MonkeyPatch) -> None:
    """Actors still send descriptions of this class, so it stays; it cannot be made from the same arguments."""
    from transfer_queue.utils.zmq_utils import ZMQServerInfo

    def made(self: Any, **what: Any) -> None:
        raise TypeError

    patch.setattr(ZMQServerInfo, "__init__", made)
