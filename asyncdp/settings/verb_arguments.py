"""Checks the arguments of verbs before anything is sent; a wrong one is DataPlaneBadRequest, which names it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, TensorDictBase

from asyncdp.errors import DataPlaneBadRequest
from asyncdp.meta import KVBatchMeta, RowHandle, is_meta
from asyncdp.rows.pack import raw_leaf, unstacked
from asyncdp.rows.plain_values import PLAIN, plain

if TYPE_CHECKING:
    from asyncdp.meta import Tags

__all__ = [
    "Rows",
    "bad",
    "choice",
    "count",
    "field_columns",
    "first_duplicate",
    "flag",
    "ids",
    "name",
    "names",
    "of_verb",
    "rows",
    "seconds",
    "tag_rows",
]


V = TypeVar("V", bound=Callable[..., Awaitable[Any]])
Word = TypeVar("Word", bound=str)


def of_verb(verb: V) -> V:
    """Decorate a verb so that errors of its arguments name the verb too."""

    @functools.wraps(verb)
    async def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return await verb(*args, **kwargs)
        except DataPlaneBadRequest as err:
            err.op = err.op or verb.__name__
            raise

    return cast("V", checked)


def bad(what: str, field: str) -> DataPlaneBadRequest:
    """Return the error for a wrong argument; ``field`` is its name."""
    return DataPlaneBadRequest(what, field=field)


def name(value: Any, what: str) -> str:
    """Check that a value is a non-empty string, and return it as an exact ``str``."""
    if not isinstance(value, str) or not value:
        hint = f"; give its value, {value.value!r}" if isinstance(value, Enum) else ""
        raise bad(f"{what} must be a non-empty string, not {value!r:.80}{hint}", what)
    return value if type(value) is str else str.__str__(value)


def names(values: Any, what: str) -> tuple[str, ...]:
    """Check a sequence of non-empty strings, and return them as a tuple of exact ``str``; a lone string is refused."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable) or getattr(values, "shape", None) == ():
        raise bad(f"{what} must be a sequence of strings, not {values!r:.80}", what)
    found = tuple(values)
    for value in found:
        if type(value) is not str or not value:
            return tuple(name(value, f"each of {what}") for value in found)
    return found


def ids(values: Any, what: str = "sample_ids") -> tuple[str, ...]:
    """Check the ids of rows, whose order is that of rows and tags; a set is refused, since it has no order."""
    if isinstance(values, (set, frozenset)):
        raise bad(f"{what} must be in the order of its rows, which a {type(values).__name__} does not keep", what)
    return names(values, what)


class Rows(NamedTuple):
    """The rows that an argument of a verb names.

    Attributes:
        ids: Ids of the rows.
        handles: Handles with the lives of the rows; None for plain ids or a meta without handles.
        meta: The meta that was given; None for plain ids.
        is_group: Whether a group meta was given.
    """

    ids: tuple[str, ...]
    handles: tuple[RowHandle | None, ...] | None = None
    meta: KVBatchMeta | None = None
    is_group: bool = False

    @property
    def lives(self) -> tuple[int | None, ...] | None:
        """The incarnation of each row, None for any; None if no row has one."""
        if self.handles is None or not any(self.handles):
            return None
        return tuple(None if handle is None else handle.incarnation for handle in self.handles)


def rows(given: Any, partition_id: str, what: str, *, ordered: bool = False) -> Rows:
    """Return the rows that ids, a meta or a group meta name; metas of other projects are read by their attributes.

    If ``ordered``, plain ids must have an order, see :func:`ids`.
    """
    if is_meta(given):
        meta = KVBatchMeta.of(given)
        group = False
    elif hasattr(given, "group_id") and hasattr(given, "partition_id"):
        keys = ids(given.keys, f"{what}.keys")
        handles = list(getattr(given, "handles", None) or [None] * len(keys))
        meta = KVBatchMeta(given.partition_id, sample_ids=list(keys), handles=handles)
        group = True
    else:
        return Rows(ids(given, what) if ordered else names(given, what))
    if meta.partition_id != partition_id:
        raise bad(f"the meta is of partition {meta.partition_id!r}, not {partition_id!r}", what)
    found = ids(meta.sample_ids, what)
    return Rows(found, None if meta.handles is None else tuple(meta.handles), meta, group)


def choice(value: Any, what: str, among: Sequence[Word]) -> Word:
    """Check that a value is one of a few words, and return it."""
    for word in among:
        if isinstance(value, str) and value == word:
            return word
    raise bad(f"{what} must be one of {', '.join(map(repr, among))}, not {value!r:.80}", what)


def first_duplicate(values: Iterable[str]) -> str | None:
    """Return the first value that occurs a second time, or None."""
    seen: set[str] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None


def flag(value: Any, what: str) -> bool:
    """Check that a value is a bool; a string such as "no", which would be true, is refused."""
    found = _number(value)
    if type(found) is not bool:
        raise bad(f"{what} must be True or False, not {value!r:.80}", what)
    return found


def device(value: Any) -> torch.device | None:
    """Check that a value names a device that is there, and return it; None: none is named."""
    if value is None:
        return None
    try:
        found = torch.device(value)
    except (RuntimeError, TypeError, ValueError) as err:
        raise bad(f"device: torch knows no device {value!r:.80}", "device") from err
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found.type == "cuda" and (found.index or 0) >= there:
        raise bad(f"device: {str(found)!r} is not there; torch finds {there} CUDA devices", "device")
    return found


def count(value: Any, what: str, least: int = 1) -> int:
    """Check that a value is an int of at least ``least``, and return it."""
    found = _number(value)
    if type(found) is not int or found < least:
        raise bad(f"{what} must be an int of at least {least}, not {value!r}", what)
    return found


def seconds(value: Any, verb: str) -> float:
    """Check a timeout in seconds: a number of at least 0, possibly infinity."""
    found = _number(value)
    if type(found) not in {int, float} or not found >= 0:
        msg = f"timeout_s must be a number of seconds, at least 0, not {value!r}"
        raise DataPlaneBadRequest(msg, op=verb, field="timeout_s")
    if type(found) is int and found > sys.float_info.max:
        msg = f"timeout_s is a number of {found.bit_length()} bits; for no limit, give float('inf')"
        raise DataPlaneBadRequest(msg, op=verb, field="timeout_s")
    return cast("float", found)


def _number(value: Any) -> Any:
    """Return a number as an exact built-in one; None if the value is no number."""
    try:
        return plain(value)
    except TypeError:
        return None


#: Tags that the plane itself reads, with their types.
_TYPED_TAGS: Mapping[str, tuple[type, ...]] = {
    "group_id": (str, int),
    "weight_version": (int,),
    "expected_num_keys": (int,),
    "committed": (bool,),
    "status": (str,),
    "created_at": (float, int),
    "size_bytes": (int,),
    "input_lengths": (int,),
}
#: Least values of tags that the plane itself reads.
_LEAST_TAGS: Mapping[str, int] = {"expected_num_keys": 1, "size_bytes": 0, "input_lengths": 0}


def tag_rows(tags: Any, n: int) -> tuple[Tags, ...]:
    """Check the tags of ``n`` samples, and return one plain dict of Python primitives per sample."""
    if isinstance(tags, (str, bytes, Mapping)) or not isinstance(tags, Iterable):
        raise bad(f"tags must be a sequence of one dict per sample, not {type(tags).__name__}", "tags")
    rows = list(tags)
    if len(rows) != n:
        raise bad(f"tags has {len(rows)} entries for {n} samples", "tags")
    return tuple(_tag_row(row, at) for at, row in enumerate(rows))


def _tag_row(row: Any, at: int) -> Tags:
    if not isinstance(row, Mapping):
        raise bad(f"tags[{at}] must be a dict, not {type(row).__name__}", "tags")
    found: Tags = {}
    for key, value in row.items():
        if type(key) is not str:
            if not isinstance(key, str):
                raise bad(f"tags[{at}] has the key {key!r}; keys are strings", "tags")
            key = str.__str__(key)  # noqa: PLW2901 - the same name as an exact str
        found[key] = value if type(value) in PLAIN else _tag_value(key, value, at)
    if len(found) != len(row):
        raise bad(f"tags[{at}] has two keys of the same text among {list(row)}", "tags")
    for key in _TYPED_TAGS.keys() & found.keys():
        if found[key] is not None:
            _check_typed(key, found[key], at)
    return found


def _tag_value(key: str, value: Any, at: int) -> Any:
    """Convert the value of a tag to a plain type."""
    try:
        return plain(value)
    except TypeError:
        hint = f"; give its value, {value.value!r}" if isinstance(value, Enum) else ""
        kind = type(value).__name__
        raise bad(
            f"tag {key!r} of tags[{at}] is a {kind}; tags are str, int, float, bool or None{hint}", "tags"
        ) from None


def _check_typed(key: str, value: Any, at: int) -> None:
    """Check a tag that the plane itself reads."""
    if type(value) not in _TYPED_TAGS[key]:
        kinds = " or ".join(kind.__name__ for kind in _TYPED_TAGS[key])
        raise bad(f"tag {key!r} of tags[{at}] must be {kinds}, not {value!r}", key)
    if key in _LEAST_TAGS and value < _LEAST_TAGS[key]:
        raise bad(f"tag {key!r} of tags[{at}] must be at least {_LEAST_TAGS[key]}, not {value!r}", key)
    if key == "created_at" and not abs(value) <= sys.float_info.max:  # written so that NaN is refused too
        raise bad(f"tag {key!r} of tags[{at}] must be a finite number of unix seconds", key)


def field_columns(fields: Any, n: int) -> TensorDict | None:
    """Check a TensorDict, or a plain dict of columns, against the number of samples."""
    if fields is None:
        return None
    if isinstance(fields, TensorDictBase) and not isinstance(fields, NonTensorStack):
        if not fields.batch_size or fields.batch_size[0] != n:
            raise bad(f"fields has batch size {tuple(fields.batch_size)} for {n} samples", "fields")
        if isinstance(fields, LazyStackedTensorDict) and n:
            fields = unstacked(fields)
        keys = tuple(fields.keys())  # a TensorDict itself iterates over rows
        for key in keys:
            if not isinstance(key, str) or not key:
                raise bad(f"fields has the key {key!r}; field names are non-empty strings", "fields")
        return cast("TensorDict", fields if set(map(type, keys)) <= {str} else _renamed(fields, keys))
    if isinstance(fields, Mapping):
        keys = names(fields, "fields")
        # A plain dict of columns is accepted too; each column is checked when it is converted.
        return cast("TensorDict", fields if set(map(type, fields)) <= {str} else _renamed(fields, tuple(fields)))
    raise bad(f"fields must be a TensorDict, not {type(fields).__name__}", "fields")


def _renamed(fields: Any, keys: tuple[str, ...]) -> Any:
    """Return the same columns with exact strings as names."""
    found = {str.__str__(key): raw_leaf(fields, key) for key in keys}
    if len(found) != len(keys):
        raise bad(f"fields has two keys of the same text among {list(keys)}", "fields")
    return TensorDict(found, batch_size=fields.batch_size) if isinstance(fields, TensorDictBase) else found
