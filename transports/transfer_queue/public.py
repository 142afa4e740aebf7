"""Reads and writes of storage units through TransferQueue's documented calls only: the fallback of private.py.

The public calls distribute rows by index over all units of a storage manager. Here each unit has its own client and
storage manager, so that all rows of a request go to that unit and a failing unit affects only its own rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from asyncdp.errors import DataPlaneClearError

__all__ = ["PublicUnits"]

#: Partition that no controller has: rows are published by our directory, not by TransferQueue.
NOWHERE = "__asyncdp__nowhere"


class PublicUnits:
    """Holds one TransferQueue client per storage unit.

    Args:
        client_id: Id of this client towards the servers.
        units: TransferQueue's descriptions of the units, by id.
        connect: Creates a client with a given name for the given units.
    """

    def __init__(self, client_id: str, units: Mapping[str, Any], connect: Callable[[str, dict[str, Any]], Any]) -> None:
        """Connect to each unit."""
        self._clients: dict[str, Any] = {}
        try:
            for number, (unit, info) in enumerate(units.items()):
                self._clients[unit] = connect(f"{client_id}-{number}", {unit: info})
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _meta(keys: Sequence[int], fields: Sequence[str] = ()) -> Any:
        from transfer_queue.metadata import BatchMeta

        return BatchMeta(list(keys), [NOWHERE] * len(keys), field_schema={name: {} for name in fields})

    async def put(self, unit: str, keys: Sequence[int], values: Mapping[str, Sequence[Any]]) -> None:
        """Store one value per field and key; values are sent as bytes, which TransferQueue stores unchanged."""
        from tensordict import NonTensorStack, TensorDict

        data = TensorDict({name: NonTensorStack(*map(_raw, rows)) for name, rows in values.items()}, [len(keys)])
        await self._clients[unit].storage_manager.put_data(data, self._meta(keys))

    async def get(self, unit: str, keys: Sequence[int], fields: Sequence[str]) -> dict[str, list[Any]]:
        """Return the values of fields by key."""
        rows = await self._clients[unit].storage_manager.get_data(self._meta(keys, fields))
        return {name: _rows(rows.get(name)) for name in fields}

    async def clear(self, unit: str, keys: Sequence[int]) -> None:
        """Remove keys. If the unit does not answer, the public call still returns normally after its timeout."""
        from transfer_queue.storage.managers import simple_storage_manager

        patience_s = float(getattr(simple_storage_manager, "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT", float("inf")))
        began = time.monotonic()
        await self._clients[unit].storage_manager.clear_data(self._meta(keys))
        if time.monotonic() - began >= 0.9 * patience_s:
            msg = "the storage unit did not answer"
            raise DataPlaneClearError(msg, host=unit)

    def close(self) -> None:
        """Close all clients."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()


def _raw(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    return bytes(value)


def _rows(column: Any) -> list[Any]:
    """Return the values of a column that TransferQueue packed."""
    if isinstance(column, torch.Tensor):
        return list(column.unbind(0))
    items: list[Any] = column.tolist()
    return items
