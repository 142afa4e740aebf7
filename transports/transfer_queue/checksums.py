"""A CRC-32 beside each value in a storage unit, for planes that want to know that no bit was flipped on the way.

It is a column of its own per field, seeded with the storage key, so that another row's bytes do not pass for these.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from asyncdp.errors import CorruptPayload

__all__ = ["MARK", "beside", "check", "sums_of"]

#: Last word of the form of a column that has checksums.
MARK = "crc32"


def beside(field: str) -> str:
    """Return the name of the column that holds the checksums of a field."""
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
    """Compare what came with its checksums.

    Raises:
        CorruptPayload: A value is not what was put; the field is named.
    """
    for name in fields:
        for value, key, told in zip(values[name], keys, values[beside(name)], strict=True):
            if _sum(value, key) != bytes(told):
                raise CorruptPayload(f"a value of field {name!r} does not match its checksum", field=name)
