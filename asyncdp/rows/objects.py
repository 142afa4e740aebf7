"""Encodes non-tensor values, and tensors within them, as bytes."""

from __future__ import annotations

import io
import pickle
from typing import Any, Protocol

import torch

__all__ = ["PICKLE", "ObjectCodec", "PickleCodec", "frozen", "raw_bytes", "thawed"]


def raw_bytes(values: torch.Tensor) -> Any:
    """View a contiguous tensor as a bytes-like object, whatever its dtype."""
    return values.contiguous().reshape(-1).view(torch.uint8).numpy() if values.numel() else b""


class ObjectCodec(Protocol):
    """Encodes one non-tensor value as bytes and decodes it to an equal one; raises if it cannot."""

    def dumps(self, value: Any) -> bytes:
        """Encode one value."""

    def loads(self, data: bytes) -> Any:
        """Decode the result of ``dumps``."""


def frozen(values: torch.Tensor) -> tuple[bytes, torch.dtype, tuple[int, ...]]:
    """Return a tensor as bytes, dtype and shape; torch's own pickles of float8 and unsigned tensors cannot be read."""
    return bytes(raw_bytes(values)), values.dtype, tuple(values.shape)


def thawed(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor of which ``frozen`` returned these parts."""
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)


class _Pickler(pickle.Pickler):
    """Pickles what pickle can, and plain tensors of any dtype."""

    def reducer_override(self, value: Any) -> Any:
        """Pickle plain tensors with :func:`frozen`."""
        if type(value) is not torch.Tensor or value.layout != torch.strided or value.device.type != "cpu":
            return NotImplemented
        if value.is_nested or value.is_quantized or value.requires_grad or value.is_conj() or value.is_neg():
            return NotImplemented
        return thawed, frozen(value)


class PickleCodec:
    """Encodes every picklable value; only for bytes that never leave this process, since unpickling runs code."""

    def dumps(self, value: Any) -> bytes:
        """Encode one value."""
        out = io.BytesIO()
        _Pickler(out, protocol=5).dump(value)
        return out.getvalue()

    def loads(self, data: bytes) -> Any:
        """Decode the result of ``dumps``."""
        return pickle.loads(data)  # noqa: S301 - the bytes were made by this process


PICKLE = PickleCodec()
