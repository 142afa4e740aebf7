"""Encoding of values that are no tensors: msgpack, with extension types for the types that msgpack would change.

msgpack preserves None, bool, 64-bit ints, floats, str, bytes, lists and dicts. Tuples, sets, frozensets, bytearrays,
ints of any size, complex numbers, numpy arrays (of objects, too) and scalars, and dense tensors are encoded as
extension types, so that each is decoded to an equal value of the same type; tensors are decoded to the CPU, without
grad. Subclasses (an OrderedDict, an IntEnum, a named tuple) would be decoded to their base class, so they are refused.
"""

from __future__ import annotations

import math
import pickle
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

import numpy as np

from asyncdp.errors import CorruptPayload, DataPlaneError

__all__ = ["MsgpackCodec"]

_TUPLE, _SET, _FROZENSET, _INT, _COMPLEX, _BYTEARRAY, _ARRAY, _SCALAR, _OBJECTS, _TENSOR = range(1, 11)
#: Code of pickles, apart from the others, because decoding one runs code that its writer chose.
_PICKLE = 100
#: Deepest nesting of tuples, sets and arrays, without the lists and dicts in between: each level is one more pass.
_MAX_PASSES = 64
#: Deepest nesting of all containers together; far below Python's recursion limit.
_MAX_DEPTH = 256
#: Most containers in one value: ``_FREE``, or one for each ``_BYTES_EACH`` packed bytes if that is more; a set counts
#: ``_SET_COUNTS`` times, and so does a tensor. An empty list is one byte packed and 56 bytes decoded; an empty set is
#: four and 216; an empty tensor is 16 and some 600.
_FREE: Final = 1 << 16
_BYTES_EACH: Final = 4
_SET_COUNTS: Final = 4
#: Longer lists and dicts are decoded only after the announced lengths of the whole value were checked, because msgpack
#: allocates memory by announced lengths.
_LONG: Final = 1 << 17
#: Most members of one set, or keys of one dict, with equal hashes. Hashes of ints and tuples are predictable, and each
#: further member of an equal hash is compared with all before it.
_MOST_ALIKE: Final = 64
#: Most comparisons, about, that building a set or dict takes because members of equal hash are tuples or sets.
_MOST_COMPARED: Final = 1 << 22
#: Most items that all lists and dicts of a value may announce together before their lengths are checked one by one:
#: 8 bytes are allocated for each.
_MOST_ANNOUNCED: Final = 1 << 22
_LAST_CODE_POINT: Final = 0x10FFFF
_TOO_DEEP: Final = f"nested more than {_MAX_DEPTH} levels deep, or {_MAX_PASSES} of tuples and sets"
#: Kinds of numpy dtypes that are plain bytes: bool, ints, floats, complex, times, fixed-size strings.
_PLAIN_KINDS = frozenset("biufcmMSU")
_NO_PICKLES: Final = (
    "a pickled value came, and allow_pickle is off: turn ucxx.allow_pickle on in this process' own config, if it trusts"
    " whoever may put"
)
#: Dtypes of tensors among objects, by their names in torch; all of them can be viewed as bytes.
_TENSOR_TYPES: Final = frozenset(
    {
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16"),
        *("float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    }
)
#: Most dimensions of such a tensor, as of a numpy array.
_MAX_RANK: Final = 64
#: Types that msgpack encodes as bytes even with ``strict_types``.
_BUFFERS = frozenset({bytearray, memoryview})
_NESTING: Final = frozenset({list, tuple, dict, set, frozenset})
_LOOKED_INTO: Final = _NESTING | _BUFFERS
_SETS: Final = (bytes([_SET]), bytes([_FROZENSET]), bytes([_TENSOR]))
#: Matches encoded numbers, None and bools: everything but text, bytes, extensions and containers.
_NUMBERS: Final = re.compile(
    rb"(?s)(?:[\x00-\x7f\xc0\xc2\xc3\xe0-\xff]++|[\xcc\xd0].|[\xcd\xd1]..|[\xca\xce\xd2].{4}|[\xcb\xcf\xd3].{8})*+"
)
#: The texts of numpy dtypes of these kinds, as ``dtype.str`` has them.
_DTYPE: Final = re.compile(r"[<>|=]?[biufcmMSU][0-9]{0,10}(?:\[[0-9]{0,10}[A-Za-z]{1,2}\])?")
#: Encoded bytes, texts and extensions, by first byte: the bytes of their length field, and the bytes of the content
#: that this length does not count.
_TEXTS: Final = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_TEXTS.update({0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)})
_TEXTS.update({0xD4 + power: (0, 1 + (1 << power)) for power in range(5)})


class MsgpackCodec:
    """Encodes values exactly or refuses them; implements :class:`~asyncdp.rows.block.ObjectCodec`.

    Args:
        allow_pickle: Whether values of other types are encoded as pickles. Every process that may write can then run
            code in every process that reads, so all of them have to trust each other.

    Raises:
        ImportError: msgpack is not installed; the message names the extra.
    """

    def __init__(self, *, allow_pickle: bool = False) -> None:
        """Import msgpack."""
        try:
            import msgpack
        except ImportError as err:
            raise ImportError(
                f"objects travel as msgpack; it needs the extra: pip install 'asyncdp[ucxx]' ({err})"
            ) from err
        self._msgpack: Any = msgpack
        self.allow_pickle = allow_pickle

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the codec by its arguments; it is pickled with errors that contain the rows that were read."""
        return _made, (self.allow_pickle,)

    def dumps(self, value: Any) -> bytes:
        """Encode one value.

        Raises:
            TypeError, ValueError: The value cannot be encoded exactly; the message names its type or the reason.
        """
        try:
            nest = _Nest()
            nest.look_at((value,), 0)
            packed = self._pack(value, 0, nest)
        except RecursionError as err:
            raise ValueError(f"{_TOO_DEEP}, or within itself") from err
        _check_count(nest.count, len(packed))
        return packed

    def loads(self, data: bytes) -> Any:
        """Decode a value that ``dumps`` encoded.

        Raises:
            CorruptPayload: The bytes are no valid value, or contain a pickle while ``allow_pickle`` is off.
        """
        try:
            heads = _heads(data)
            value = self._read(data, heads)
            if heads > _MAX_DEPTH:
                _Nest().look_at((value,), 0)
        except DataPlaneError:
            raise
        except RecursionError as err:
            raise CorruptPayload(f"an object cannot be decoded: {_TOO_DEEP}", cause=err) from err
        except Exception as err:
            raise CorruptPayload(f"an object cannot be decoded: {type(err).__name__}: {err}", cause=err) from err
        return value

    def _read(self, data: bytes, heads: int) -> Any:
        if heads <= _FREE:
            try:
                return self._unpack(data, 0, None, min(_LONG, _MOST_ANNOUNCED // max(1, heads)))
            except ValueError as err:
                if "exceeds max_" not in str(err):
                    raise
        within = _surely_within(data, heads)
        return self._unpack(data, 0, None if within else _Survey(len(data)), len(data))

    # -- encoding

    def _pack(self, value: Any, passes: int, nest: _Nest) -> bytes:
        if passes > _MAX_PASSES:
            raise RecursionError
        if nest.buffers:
            value = self._swap(value, passes, nest)

        def extend(inner: Any) -> Any:
            return self._extend(inner, passes + 1, nest)

        packed: bytes = self._msgpack.packb(
            value, default=extend, strict_types=True, use_bin_type=True, unicode_errors="surrogatepass"
        )
        return packed

    def _swap(self, value: Any, passes: int, nest: _Nest) -> Any:
        """Replace the bytearrays in lists and dicts, which msgpack would turn into bytes even with strict_types."""
        kind = type(value)
        if kind is list:
            return [self._swap(item, passes, nest) for item in value]
        if kind is dict:
            return {key: self._swap(item, passes, nest) for key, item in value.items()}
        return self._extend(value, passes, nest) if kind in _BUFFERS else value

    def _extend(self, value: Any, passes: int, nest: _Nest) -> Any:  # noqa: PLR0911 - one branch per type
        ext: Callable[[int, bytes], Any] = self._msgpack.ExtType
        kind = type(value)
        if kind is tuple:
            return ext(_TUPLE, self._pack(list(value), passes, nest))
        if kind is set or kind is frozenset:
            return ext(_SET if kind is set else _FROZENSET, self._pack(list(value), passes, nest))
        if kind is int:
            return ext(_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        if kind is complex:
            return ext(_COMPLEX, np.complex128(value).tobytes())
        if kind is bytearray:
            return ext(_BYTEARRAY, bytes(value))
        parts = _parts(value, nest)
        if parts is not None:
            return ext(parts[0], self._pack(parts[1], passes, nest))
        if self.allow_pickle:
            return ext(_PICKLE, pickle.dumps(value, protocol=5))
        raise TypeError(
            f"a value of type {kind.__module__}.{kind.__qualname__} cannot be kept unchanged (allow_pickle=True would)"
        )

    # -- decoding

    def _unpack(self, data: bytes, passes: int, survey: _Survey | None, longest: int = _LONG) -> Any:
        if passes > _MAX_PASSES:
            raise RecursionError
        if survey is not None:
            survey.add(data)  # before anything is decoded

        def restore(code: int, body: bytes) -> Any:
            return self._restore(code, body, passes + 1, survey, longest)

        return self._msgpack.unpackb(
            data,
            ext_hook=restore,
            object_pairs_hook=_dict,
            raw=False,
            strict_map_key=False,
            unicode_errors="surrogatepass",
            max_array_len=longest,
            max_map_len=longest,
        )

    def _restore(  # noqa: PLR0911 - one branch per code
        self, code: int, body: bytes, passes: int, survey: _Survey | None, longest: int
    ) -> Any:
        if code == _TUPLE:
            return tuple(self._unpack(body, passes, survey, longest))
        if code in (_SET, _FROZENSET):
            members = self._unpack(body, passes, survey, longest)
            _apart(members)
            return set(members) if code == _SET else frozenset(members)
        if code == _INT:
            return int.from_bytes(body, "little", signed=True)
        if code == _COMPLEX:
            return complex(np.frombuffer(body, np.complex128, count=1)[0])
        if code == _BYTEARRAY:
            return bytearray(body)
        if code in (_ARRAY, _SCALAR, _OBJECTS, _TENSOR):
            return _whole(code, self._unpack(body, passes, survey, longest))
        if code == _PICKLE and self.allow_pickle:
            return pickle.loads(body)  # noqa: S301 - the user enabled it
        if code == _PICKLE:
            raise CorruptPayload(_NO_PICKLES, retryable=False, blames_port=False)
        raise ValueError(f"unknown extension type {code}")


def _parts(value: Any, nest: _Nest) -> tuple[int, list[Any]] | None:
    """Return the code of an array, scalar or tensor and a list that encodes it, counted; None for other values."""
    if type(value) is np.ndarray and value.dtype.kind in _PLAIN_KINDS:
        nest.count += 2  # for the list that encodes it, and for its shape
        return _ARRAY, [value.dtype.str, list(value.shape), _readable(value.tobytes(), value.dtype)]
    if type(value) is np.ndarray and value.dtype.kind == "O":
        items = value.ravel().tolist()
        nest.count += 2
        nest.look_at((items,), 0)
        return _OBJECTS, [list(value.shape), items]
    if isinstance(value, np.generic) and value.dtype.kind in _PLAIN_KINDS:
        nest.count += 1
        return _SCALAR, [value.dtype.str, _readable(value.tobytes(), value.dtype)]
    if _is_tensor(value):
        nest.count += 2 + _SET_COUNTS - 1
        return _TENSOR, _tensor_parts(value)
    return None


def _is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor that :func:`_tensor_parts` can encode; one of a subclass is not."""
    torch: Any = sys.modules.get("torch")  # without it there are no tensors; hosts do not import it
    return (
        torch is not None
        and type(value) is torch.Tensor
        and value.layout == torch.strided
        and not (value.is_nested or value.is_quantized)
        and value.device.type != "meta"
        and value.ndim <= _MAX_RANK
        and str(value.dtype).removeprefix("torch.") in _TENSOR_TYPES
    )


def _tensor_parts(value: Any) -> list[Any]:
    """Return dtype, shape and bytes of a dense tensor."""
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    raw = plain.reshape(-1).view(sys.modules["torch"].uint8).numpy().tobytes() if plain.numel() else b""
    return [str(value.dtype).removeprefix("torch."), list(value.shape), raw]


def _whole(code: int, parts: list[Any]) -> Any:
    """Make the array, scalar or tensor of what :func:`_parts` returned."""
    if code == _TENSOR:
        return _tensor(*parts)
    if code == _OBJECTS:
        shape, items = parts
        return np.fromiter(items, dtype=object, count=len(items)).reshape(shape)  # np.array would look into lists
    kind = _plain(parts[0])
    raw = _readable(parts[-1], kind)
    if code == _ARRAY:
        return np.frombuffer(raw, kind).reshape(parts[1]).copy()
    # An empty text has no bytes, so ``frombuffer`` cannot make the one element of it.
    return np.frombuffer(raw, kind, count=1)[0] if kind.itemsize else kind.type()


def _tensor(name: str, shape: list[int], raw: bytes) -> Any:
    """Make a tensor of dtype, shape and bytes."""
    import torch  # hosts and servers, which decode nothing, run without it

    if name not in _TENSOR_TYPES or len(shape) > _MAX_RANK or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"a tensor of {name} of shape {shape!r:.80} is not kept")
    dtype = getattr(torch, name)
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise ValueError(f"a tensor of {name} of shape {shape!r:.80} in {len(raw)} bytes")
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)


def _made(allow_pickle: bool) -> MsgpackCodec:  # noqa: FBT001 - called by pickle
    return MsgpackCodec(allow_pickle=allow_pickle)


def _heads(data: bytes) -> int:
    """Count the bytes that could begin a list or a dict, at any position: an upper bound of their number."""
    if len(data) <= _MAX_DEPTH:
        return len(data)
    all_ = np.frombuffer(data, np.uint8)
    return int(np.count_nonzero(all_ - np.uint8(0x80) < 0x20) + np.count_nonzero(all_ - np.uint8(0xDC) < 4))  # noqa: PLR2004


def _surely_within(data: bytes, heads: int) -> bool:
    """Return whether a value is surely within the bounds of a survey, whatever its bytes mean.

    All bytes that could begin a set, a tensor or a long list are counted, at any position, as ``heads`` counts lists
    and dicts: a long list of numbers passes by this, and need not be surveyed number by number.
    """
    end, all_ = len(data), np.frombuffer(data, np.uint8)
    sets, heavy = 0, np.frombuffer(b"".join(_SETS), np.uint8)
    for first, last, at in ((0xD4, 0xD8, 1), (0xC7, 0xC7, 2), (0xC8, 0xC8, 3), (0xC9, 0xC9, 5)):
        codes = all_[at:][all_[:-at] - np.uint8(first) <= last - first]
        sets += int(np.count_nonzero(np.isin(codes, heavy)))
    if heads + (_SET_COUNTS - 1) * sets > max(_FREE, end // _BYTES_EACH):
        return False
    announced = 0
    for first, nbytes in ((0xDD, 4), (0xDC, 2)):  # lists and dicts with a length of four or two bytes
        begins = np.flatnonzero((all_[:-nbytes] | 2) == first | 2)
        shifted = (all_[begins + at].astype(np.int64) << (8 * (nbytes - at)) for at in range(1, nbytes + 1))
        lengths = sum(shifted, np.zeros(1, np.int64))
        announced += int(lengths[lengths <= end].sum())
    return announced <= max(end, _MOST_ANNOUNCED)


def _check_count(count: int, nbytes: int) -> None:
    if count > max(_FREE, nbytes // _BYTES_EACH):
        raise ValueError(
            f"{count} lists, dicts, tuples and sets in {nbytes} bytes: so many small ones take far more memory where"
            " they are read; put them as a tensor or a numpy array"
        )


class _Nest:
    """Counts the containers in a value that is to be encoded.

    Attributes:
        count: Number of lists, dicts, tuples and sets; each set counts ``_SET_COUNTS`` times.
        buffers: Whether the value or a container in it contains a bytearray or memoryview.
    """

    __slots__ = ("buffers", "count")

    def __init__(self) -> None:
        self.count = 0
        self.buffers = False

    def look_at(self, items: Iterable[Any], depth: int) -> None:
        """Examine values and, recursively, what they contain.

        Raises:
            RecursionError: They are nested too deeply.
            ValueError: Too many members of a set, or keys of a dict, have equal hashes.
        """
        for item in items:
            kind = type(item)
            if kind in _NESTING:
                self.count += 1
                if depth >= _MAX_DEPTH:
                    raise RecursionError
                if kind is dict:
                    _apart(item)
                    if not _LOOKED_INTO.isdisjoint(map(type, item)):
                        self.look_at(item, depth + 1)
                    item = item.values()  # noqa: PLW2901 - its keys were examined above
                elif kind is not list and kind is not tuple:
                    self.count += _SET_COUNTS - 1
                    _apart(item)
                if not _LOOKED_INTO.isdisjoint(map(type, item)):
                    self.look_at(item, depth + 1)
            elif kind in _BUFFERS:
                self.buffers = True


class _Survey:
    """Adds up the lengths that a packed value announces, before anything is decoded.

    Args:
        packed: Length of the packed value, in bytes.
    """

    __slots__ = ("_count", "_packed")

    def __init__(self, packed: int) -> None:
        self._packed = packed
        self._count = 0

    def add(self, data: bytes) -> None:
        """Count the containers that a pass over ``data`` would create; extensions in it are counted in their own pass.

        Raises:
            ValueError: There are too many, or lists announce more items than there are bytes.
        """
        at, end, items = 0, len(data), 0
        while at < end:
            at = _NUMBERS.match(data, at).end()  # type: ignore[union-attr]  # it matches nothing as well
            if at >= end:
                break
            first = data[at]
            at += 1
            if 0xA0 <= first < 0xC0:  # noqa: PLR2004 - short texts, of the length in their first byte
                at += first & 31
                continue
            if first in _TEXTS:
                digits, more = _TEXTS[first]
                if more and data[at + digits : at + digits + 1] in _SETS:
                    self._count += _SET_COUNTS - 1
                at += digits + more + int.from_bytes(data[at : at + digits], "big")
                continue
            n = first & 15
            if first > 0xDB:  # noqa: PLR2004 - lists and dicts of any length
                digits = 4 if first & 1 else 2
                n = int.from_bytes(data[at : at + digits], "big")
                at += digits
            elif first >= 0xA0:  # noqa: PLR2004
                raise ValueError("a number is cut off")
            is_dict = first < 0x90 or first in (0xDE, 0xDF)  # noqa: PLR2004
            items += 2 * n if is_dict else n
            self._count += 1
            if items > end:
                raise ValueError(f"lists of {items} items in {end} bytes")
        _check_count(self._count, self._packed)


def _apart(members: Collection[Any]) -> None:
    """Refuse members of which many have equal hashes: to build a set of 20,000 such would take minutes."""
    nested = any(type(member) in (tuple, frozenset) for member in members)
    if len(members) <= _MOST_ALIKE and not nested:
        return
    hashes = list(map(hash, members))
    counts = Counter(hashes)
    if len(counts) == len(members):
        return
    most = max(counts.values())
    if most > _MOST_ALIKE:
        raise ValueError(f"more than {_MOST_ALIKE} members of one hash")
    if nested:
        alike = (member for member, hashed in zip(members, hashes, strict=True) if counts[hashed] > 1)
        if most * sum(_comparisons(member) for member in alike) > _MOST_COMPARED:
            raise ValueError("tuples or sets of one hash that are too large to be compared")


def _comparisons(value: Any, *, in_set: bool = False) -> int:
    """Return about how many comparisons tell a value from one of equal hash.

    Raises:
        ValueError: It is a set of sets, whose comparisons multiply with each level.
    """
    if type(value) is tuple:
        return 1 + sum(_comparisons(item, in_set=in_set) for item in value)
    if type(value) is frozenset:
        if in_set:
            raise ValueError("sets of sets of one hash")
        return _MOST_ALIKE * (1 + sum(_comparisons(item, in_set=True) for item in value))
    return 1 + (len(value) >> 6 if type(value) in (str, bytes) else 0)


def _dict(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    _apart([key for key, _ in pairs])
    return dict(pairs)


def _readable(raw: bytes, dtype: np.dtype[Any]) -> bytes:
    """Refuse numpy text with invalid code points, which numpy accepts and fails on when an element is accessed."""
    if dtype.kind == "U":
        points = np.frombuffer(raw, np.dtype(np.uint32).newbyteorder(dtype.byteorder))
        if len(points) and points.max() > _LAST_CODE_POINT:
            raise ValueError("text of a code point that does not exist")
    return raw


def _plain(text: str) -> np.dtype[Any]:
    if not _DTYPE.fullmatch(text):  # numpy would evaluate more than that: tuples, lists of fields
        raise ValueError(f"an array of {text:.40} is not kept")
    dtype = np.dtype(text)
    if dtype.kind not in _PLAIN_KINDS or dtype.subdtype is not None:
        raise ValueError(f"an array of {text} is not kept")
    return dtype
