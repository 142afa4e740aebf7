"""A row as one object of Mooncake: a header that names key and fields, then the fields' values.

A row is never empty, because of its header; so fields of zero length are carried like all others.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["pack", "unpack"]

_START = struct.Struct("<QH")
_FIELD = struct.Struct("<HBBQ")
#: Values begin at multiples of this many bytes.
ALIGNED = 16


def _up(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _raw(value: Any) -> memoryview:
    if isinstance(value, torch.Tensor):
        if not value.numel():
            return memoryview(b"")
        flat: Any = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        return memoryview(flat)
    return memoryview(value).cast("B")


def pack(key: int, row: Mapping[str, Any]) -> list[memoryview]:
    """Return the parts of a row's object, in their order, padding included."""
    raws = [_raw(value) for value in row.values()]
    head = [_START.pack(key, len(raws))]
    for (name, value), raw in zip(row.items(), raws, strict=True):
        tensor = isinstance(value, torch.Tensor)
        dtype = str(value.dtype).removeprefix("torch.").encode() if tensor else b""
        shape = tuple(value.shape) if tensor else ()
        text = name.encode()
        head.append(_FIELD.pack(len(text), len(dtype), len(shape), raw.nbytes))
        head.append(text + dtype + struct.pack(f"<{len(shape)}Q", *shape))
    joined = b"".join(head)
    joined = struct.pack("<I", len(joined) + 4) + joined
    parts = [memoryview(joined.ljust(_up(len(joined)), b"\0"))]
    for raw in raws:
        parts.append(raw)
        if raw.nbytes % ALIGNED:
            parts.append(memoryview(bytes(_up(raw.nbytes) - raw.nbytes)))
    return parts


def unpack(key: int, raw: memoryview, fields: Sequence[str]) -> dict[str, Any]:
    """Return the values of fields of a row, which share the object's memory.

    Raises:
        KeyError: The object lacks a field, or is another key's.
        ValueError: The object is not of this form, or is shorter than its header says.
    """
    try:
        (end,) = struct.unpack_from("<I", raw, 0)
        found, count = _START.unpack_from(raw, 4)
        if found != key:
            raise KeyError(key)
        at, start = 4 + _START.size, _up(end)
        values: dict[str, Any] = {}
        for _ in range(count):
            name_size, dtype_size, dims, size = _FIELD.unpack_from(raw, at)
            at += _FIELD.size
            name = bytes(raw[at : at + name_size]).decode()
            at += name_size
            dtype = bytes(raw[at : at + dtype_size]).decode()
            at += dtype_size
            shape = struct.unpack_from(f"<{dims}Q", raw, at)
            at += 8 * dims
            value: Any = raw[start : start + size]
            if value.nbytes != size:
                raise ValueError(f"field {name!r} of an object ends after {value.nbytes} of {size} bytes")
            if dtype:
                kind = getattr(torch, dtype)
                value = torch.frombuffer(value, dtype=kind).view(shape) if size else torch.empty(shape, dtype=kind)
            values[name] = value
            start += _up(size)
    except (struct.error, UnicodeDecodeError, AttributeError, RuntimeError) as err:
        raise ValueError(f"an object of Mooncake is not a row: {err}") from err
    return {name: values[name] for name in fields}
