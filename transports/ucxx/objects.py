"""Values that are no tensors, as bytes: msgpack, with extension types for what msgpack itself would change.

msgpack keeps None, bool, 64-bit ints, floats, str, bytes, lists and dicts. Tuples, sets, frozensets, bytearrays, ints
of any size, complex numbers and numpy arrays and scalars travel as extension types, so that each comes back as it was.
Subclasses (an OrderedDict, an IntEnum, a named tuple) would come back as their base class: they are refused.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from asyncdp.errors import CorruptPayload, DataPlaneError

__all__ = ["MsgpackCodec"]

_TUPLE, _SET, _FROZENSET, _INT, _COMPLEX, _BYTEARRAY, _ARRAY, _SCALAR = range(1, 9)
#: Set apart from the rest, since reading it runs what the writer chose.
_PICKLE = 100
#: How deeply tuples, sets and the like may be nested; far below where Python's own stack ends.
_MAX_DEPTH = 64
#: Members of one set, or keys of one dict, that may share a hash: those of ints and tuples can be foretold, and each
#: further one is compared with all before it.
_MOST_ALIKE: Final = 64
_LAST_CODE_POINT: Final = 0x10FFFF
#: Kinds of numpy dtypes that are plain bytes: bool, ints, floats, complex, times, fixed-size strings.
_PLAIN_KINDS = frozenset("biufcmMSU")
#: What msgpack takes for bytes whatever it is told.
_BUFFERS = frozenset({bytearray, memoryview})


class MsgpackCodec:
    """Encodes values exactly or refuses them; an :class:`~asyncdp.block.ObjectCodec`.

    Args:
        allow_pickle: Whether values of other types travel as pickles. Then a peer that may write can run code in every
            process that reads: only among processes that trust each other.

    Raises:
        ImportError: msgpack is not installed; the message names the extra.
    """

    def __init__(self, *, allow_pickle: bool = False) -> None:
        """Load msgpack."""
        try:
            import msgpack
        except ImportError as err:
            raise ImportError(
                f"objects travel as msgpack; it needs the extra: pip install 'asyncdp[ucxx]' ({err})"
            ) from err
        self._msgpack: Any = msgpack
        self._allow_pickle = allow_pickle

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by what it was made with: an error that holds rows which came travels with their codec."""
        return _made, (self._allow_pickle,)

    def dumps(self, value: Any) -> bytes:
        """Encode one value.

        Raises:
            TypeError, ValueError: It cannot be kept as it is; the message says what it is.
        """
        try:
            return self._pack(value, 0)
        except RecursionError as err:
            raise ValueError(f"nested more than {_MAX_DEPTH} levels deep, or within itself") from err

    def loads(self, data: bytes) -> Any:
        """Decode what ``dumps`` made.

        Raises:
            CorruptPayload: The bytes are no such value, or are a pickle and ``allow_pickle`` is off.
        """
        try:
            return self._unpack(data, 0)
        except DataPlaneError:
            raise
        except Exception as err:
            raise CorruptPayload(f"an object cannot be decoded: {type(err).__name__}: {err}", cause=err) from err

    # -- out

    def _pack(self, value: Any, depth: int) -> bytes:
        if depth > _MAX_DEPTH:
            raise RecursionError
        if _holds_buffer(value):
            value = self._swap(value, depth)

        def extend(inner: Any) -> Any:
            return self._extend(inner, depth + 1)

        packed: bytes = self._msgpack.packb(
            value, default=extend, strict_types=True, use_bin_type=True, unicode_errors="surrogatepass"
        )
        return packed

    def _swap(self, value: Any, depth: int) -> Any:
        """Replace the bytearrays in lists and dicts, which msgpack would turn into bytes even with strict_types."""
        kind = type(value)
        if kind is list:
            return [self._swap(item, depth) for item in value]
        if kind is dict:
            return {key: self._swap(item, depth) for key, item in value.items()}
        return self._extend(value, depth) if kind in _BUFFERS else value

    def _extend(self, value: Any, depth: int) -> Any:  # noqa: PLR0911 - a table, in words
        ext: Callable[[int, bytes], Any] = self._msgpack.ExtType
        kind = type(value)
        if kind is tuple:
            return ext(_TUPLE, self._pack(list(value), depth))
        if kind is set or kind is frozenset:
            return ext(_SET if kind is set else _FROZENSET, self._pack(list(value), depth))
        if kind is int:
            return ext(_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        if kind is complex:
            return ext(_COMPLEX, np.complex128(value).tobytes())
        if kind is bytearray:
            return ext(_BYTEARRAY, bytes(value))
        if kind is np.ndarray and value.dtype.kind in _PLAIN_KINDS:
            return ext(_ARRAY, self._pack([value.dtype.str, list(value.shape), value.tobytes()], depth))
        if isinstance(value, np.generic) and value.dtype.kind in _PLAIN_KINDS:
            return ext(_SCALAR, self._pack([value.dtype.str, value.tobytes()], depth))
        if self._allow_pickle:
            return ext(_PICKLE, pickle.dumps(value, protocol=5))
        raise TypeError(
            f"a value of type {kind.__module__}.{kind.__qualname__} cannot be kept unchanged (allow_pickle=True would)"
        )

    # -- in

    def _unpack(self, data: bytes, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")

        def restore(code: int, body: bytes) -> Any:
            return self._restore(code, body, depth + 1)

        return self._msgpack.unpackb(
            data,
            ext_hook=restore,
            object_pairs_hook=_dict,
            raw=False,
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )

    def _restore(self, code: int, body: bytes, depth: int) -> Any:  # noqa: C901, PLR0911 - a table, in words
        if code == _TUPLE:
            return tuple(self._unpack(body, depth))
        if code == _SET:
            return set(_apart(self._unpack(body, depth)))
        if code == _FROZENSET:
            return frozenset(_apart(self._unpack(body, depth)))
        if code == _INT:
            return int.from_bytes(body, "little", signed=True)
        if code == _COMPLEX:
            return complex(np.frombuffer(body, np.complex128, count=1)[0])
        if code == _BYTEARRAY:
            return bytearray(body)
        if code == _ARRAY:
            dtype, shape, raw = self._unpack(body, depth)
            return np.frombuffer(_readable(raw, _plain(dtype)), _plain(dtype)).reshape(shape).copy()
        if code == _SCALAR:
            dtype, raw = self._unpack(body, depth)
            # Of an empty text there are no bytes; its type holds one element all the same.
            kind = _plain(dtype)
            return np.frombuffer(_readable(raw, kind), kind, count=1)[0] if kind.itemsize else kind.type()
        if code == _PICKLE and self._allow_pickle:
            return pickle.loads(body)  # noqa: S301 - the user turned it on
        if code == _PICKLE:
            raise CorruptPayload("a pickled value came, and allow_pickle is off", retryable=False, blames_port=False)
        raise ValueError(f"unknown extension type {code}")


def _made(allow_pickle: bool) -> MsgpackCodec:  # noqa: FBT001 - called by pickle
    return MsgpackCodec(allow_pickle=allow_pickle)


def _holds_buffer(value: Any) -> bool:
    """Whether a bytearray or memoryview lies in value, in its lists or in its dicts."""
    kind = type(value)
    if kind is list:
        return any(map(_holds_buffer, value))
    if kind is dict:
        return any(map(_holds_buffer, value.values()))
    return kind in _BUFFERS


def _apart(members: list[Any]) -> list[Any]:
    """Refuse members of which many have one hash: a set of 20,000 such would take minutes."""
    if len(members) > _MOST_ALIKE and max(Counter(map(hash, members)).values()) > _MOST_ALIKE:
        raise ValueError(f"more than {_MOST_ALIKE} members of one hash")
    return members


def _dict(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    if len(pairs) > _MOST_ALIKE:
        _apart([key for key, _ in pairs])
    return dict(pairs)


def _readable(raw: bytes, dtype: np.dtype[Any]) -> bytes:
    """Refuse text of code points that there are not: numpy takes them, and fails when an element is looked at."""
    if dtype.kind == "U":
        points = np.frombuffer(raw, np.dtype(np.uint32).newbyteorder(dtype.byteorder))
        if len(points) and points.max() > _LAST_CODE_POINT:
            raise ValueError("text of a code point that does not exist")
    return raw


def _plain(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.kind not in _PLAIN_KINDS or dtype.subdtype is not None:
        raise ValueError(f"an array of {text} is not kept")
    return dtype
