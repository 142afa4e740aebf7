"""Lossless encoding of requests, text and tags as msgpack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack

from asyncdp.errors import DataPlaneBadRequest

if TYPE_CHECKING:
    from asyncdp.meta import Tags

__all__ = ["load", "load_tags", "pack", "pack_tags", "packer", "text"]


def pack(value: Any) -> bytes:
    """Encode a value for the server, without the bin type, which Lua's msgpack does not support."""
    packed: bytes = msgpack.packb(value, use_bin_type=False, unicode_errors="surrogatepass")
    return packed


def load(blob: bytes) -> Any:
    """Decode a value that the server encoded; strings stay bytes."""
    return msgpack.unpackb(blob, raw=True, strict_map_key=False, use_list=True)


def text(raw: bytes) -> str:
    """Decode an id or a name; it may contain any character of a str, including lone surrogates."""
    return raw.decode("utf-8", "surrogatepass")


def packer() -> msgpack.Packer:
    """Return what encodes many values as :func:`pack` does, at a third of the time."""
    return msgpack.Packer(use_bin_type=False, unicode_errors="surrogatepass")


def pack_tags(tags: Tags, sample_id: str, encoder: msgpack.Packer) -> bytes:
    """Encode the tags of one sample; the server merges them as bytes, so that no number is changed."""
    try:
        packed: bytes = encoder.pack(tags)
    except OverflowError as err:
        name = next(key for key, value in tags.items() if isinstance(value, int) and not -(2**63) <= value < 2**64)
        msg = f"tag {name!r} of sample {sample_id!r} does not fit into 64 bits"
        raise DataPlaneBadRequest(msg, sample_ids=(sample_id,), field=name) from err
    return packed


def load_tags(blob: bytes | None) -> Tags:
    """Decode tags that :func:`pack_tags` encoded; none for None."""
    if not blob:
        return {}
    tags: Tags = msgpack.unpackb(blob, unicode_errors="surrogatepass")
    return tags
