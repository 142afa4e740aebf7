"""CRC-32 checksums that are stored beside the values in storage units, for planes with checksums enabled.

Each field has a column of checksums. They are seeded with the storage key, so that a row never matches the checksum of
another row.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from asyncdp.errors import CorruptPayload

__all__ = ["MARK", "beside", "check", "sums_of"]

#: Last element of the form of a column that has checksums.
MARK = "crc32"


def beside(field: str) -> str:
    """Return the name of the checksum column of a field."""
    return f"\0{MARK} {field}"


def _sum(value: Any, key: int) -> bytes:
    raw: Any = value
    if isinstance(value, torch.Tensor):
        raw = value.contiguous().reshape(-1).view(torch.uint8).numpy() if value.numel() else b""
    return zlib.crc32(raw, key & 0xFFFFFFFF).to_bytes(4, "little")


def sums_of(values: Mapping[str, Sequence[Any]], keys: Sequence[int]) -> dict[str, list[bytes]]:
    """Return a column of checksums for each field."""
    return {beside(name): [_sum(*one) for one in zip(rows, keys, strict=True)] for name, rows in values.items()}


def check(values: Mapping[str, Sequence[Any]], keys: Sequence[int], fields: Sequence[str]) -> None:
    """Verify received values against their checksums.

    Raises:
        CorruptPayload: A value does not match its checksum; the error names the field.
    """
    for name in fields:
        for value, key, told in zip(values[name], keys, values[beside(name)], strict=True):
            if _sum(value, key) != bytes(told):
                raise CorruptPayload(f"a value of field {name!r} does not match its checksum", field=name)
