"""Bytes and messages to fuzz with: any at all, and those that look almost right."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

__all__ = ["EDGES", "damaged", "mostly", "values_of"]

#: Numbers at which a length, an index or a generation turns from right to wrong.
EDGES = [0, 1, 2, 3, 7, 8, 63, 64, 255, 256, 4096, 65535, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 39, 1 << 61]
SPECIAL = [0.0, -1.0, 0.5, 1e9, 1e308, float("inf"), float("-inf"), float("nan")]


def _numbers(kind: inspect.IntType) -> st.SearchStrategy[int]:
    least = kind.ge if kind.ge is not None else -(1 << 63)
    most = kind.le if kind.le is not None else (kind.lt - 1 if kind.lt is not None else (1 << 63) - 1)
    edges = [edge for edge in [*EDGES, least, most] if least <= edge <= most]
    return st.sampled_from(edges) | st.integers(max(least, 0), min(most, 16)) | st.integers(least, most)


def _strategy(kind: Any) -> st.SearchStrategy[Any]:  # noqa: C901, PLR0911 - a table, in words
    if isinstance(kind, inspect.IntType):
        return _numbers(kind)
    if isinstance(kind, inspect.FloatType):
        least, most = kind.ge, kind.le  # NaN passes no bound
        some = [value for value in SPECIAL if (least is None or value >= least) and (most is None or value <= most)]
        return st.sampled_from(some) | st.floats(least, most)
    if isinstance(kind, inspect.StrType):
        return st.sampled_from(["", "a", "b", "op-1", "op-2"]) | st.text(max_size=8)
    if isinstance(kind, inspect.BytesType):
        return st.binary(min_size=kind.min_length or 0, max_size=min(kind.max_length or 64, 64))
    if isinstance(kind, inspect.BoolType):
        return st.booleans()
    if isinstance(kind, inspect.NoneType):
        return st.none()
    if isinstance(kind, inspect.ListType):
        return st.lists(_strategy(kind.item_type), max_size=4)
    if isinstance(kind, inspect.VarTupleType):
        return st.lists(_strategy(kind.item_type), max_size=4).map(tuple)
    if isinstance(kind, inspect.TupleType):
        return st.tuples(*map(_strategy, kind.item_types))
    if isinstance(kind, inspect.DictType):
        return st.dictionaries(_strategy(kind.key_type), _strategy(kind.value_type), max_size=4)
    if isinstance(kind, inspect.UnionType):
        return st.one_of(*map(_strategy, kind.types))
    if isinstance(kind, inspect.StructType):
        return values_of(kind.cls)
    raise TypeError(kind)


def values_of(kind: type[msgspec.Struct], **known: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return messages of one kind, every value within its type; ``known`` says more about some of them."""
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    fields = {field.name: known.get(field.name, _strategy(field.type)) for field in described.fields}
    return st.builds(kind, **fields)


@st.composite
def mostly(draw: st.DrawFn, usual: st.SearchStrategy[Any], other: st.SearchStrategy[Any]) -> Any:
    """Return what is usual, four times of five; ``one_of`` would weigh by how many kinds each side has."""
    return draw(usual if draw(st.integers(0, 4)) else other)


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Return bytes that were right, and were changed in a few places."""
    data = bytearray(draw(whole))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.sampled_from([1, 1, 1, 2, 4, 8, 33]))
        what = draw(st.sampled_from(["set", "flip", "cut", "insert", "repeat", "end"]))
        if what == "set":
            data[at : at + length] = draw(st.sampled_from([b"\x00", b"\xff", b"\x7f", b"\x80", b"\xc1"])) * length
        elif what == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif what == "cut":
            del data[at : at + length]
        elif what == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=length))
        elif what == "repeat":
            data[at:at] = data[max(0, at - length) : at]
        elif what == "end":
            del data[at:]
    return bytes(data)
