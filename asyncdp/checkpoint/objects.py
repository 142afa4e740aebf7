"""The encoding of objects in a checkpoint: that of UCXX, which runs no code when it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncdp.rows.objects import ObjectCodec

__all__ = ["object_codec"]


class _Lazy:
    """Imports msgpack only when there is an object."""

    def dumps(self, value: object) -> bytes:
        """Encode one value."""
        return _made().dumps(value)

    def loads(self, data: bytes) -> object:
        """Decode the result of ``dumps``."""
        return _made().loads(data)


def _made() -> ObjectCodec:
    from asyncdp.transports.ucxx.payload.objects import MsgpackCodec

    return MsgpackCodec()


def object_codec() -> ObjectCodec:
    """Return the codec; it raises ImportError at the first object where msgpack (extra ``ucxx``) is not installed."""
    return _Lazy()
