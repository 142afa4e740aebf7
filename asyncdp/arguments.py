"""Checks the arguments of verbs; what is wrong is DataPlaneBadRequest naming it, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDictBase

from asyncdp.errors import DataPlaneBadRequest
from asyncdp.pack import unstacked

if TYPE_CHECKING:
    from tensordict import TensorDict

    from asyncdp.meta import Tags

__all__ = ["bad", "count", "field_columns", "name", "names", "seconds", "tag_rows"]


def bad(what: str, field: str) -> DataPlaneBadRequest:
    """Return the error that names a wrong argument."""
    return DataPlaneBadRequest(what, field=field)


def name(value: Any, what: str) -> str:
    """Return a non-empty string."""
    if not isinstance(value, str) or not value:
        raise bad(f"{what} must be a non-empty string, not {value!r}", what)
    return value


def names(values: Any, what: str) -> tuple[str, ...]:
    """Return a tuple of non-empty strings; one string alone is refused, it would be taken apart."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise bad(f"{what} must be a sequence of strings, not {values!r:.80}", what)
    found = tuple(values)
    for value in found:
        if type(value) is not str or not value:
            name(value, f"each of {what}")
    return found


def count(value: Any, what: str, least: int = 1) -> int:
    """Return an int of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise bad(f"{what} must be an int of at least {least}, not {value!r}", what)
    return value


def seconds(value: Any, verb: str) -> None:
    """Check a timeout: a number, at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        msg = f"timeout_s must be a number of seconds, at least 0, not {value!r}"
        raise DataPlaneBadRequest(msg, op=verb, field="timeout_s")


#: Tags that the plane itself reads, and what they may be.
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
_PRIMITIVES = (str, int, float, bool, type(None))


def tag_rows(tags: Any, n: int) -> tuple[Tags, ...]:
    """Return one plain dict per sample, values as Python primitives."""
    if isinstance(tags, (str, bytes, Mapping)) or not isinstance(tags, Iterable):
        raise bad(f"tags must be a sequence of one dict per sample, not {type(tags).__name__}", "tags")
    rows = list(tags)
    if len(rows) != n:
        raise bad(f"tags has {len(rows)} entries for {n} samples", "tags")
    return tuple(_tag_row(row, at) for at, row in enumerate(rows))


def _tag_row(row: Any, at: int) -> Tags:
    if not isinstance(row, Mapping):
        raise bad(f"tags[{at}] must be a dict, not {type(row).__name__}", "tags")
    plain: Tags = {}
    for key, value in row.items():
        if not isinstance(key, str):
            raise bad(f"tags[{at}] has the key {key!r}; keys are strings", "tags")
        if type(value) in _PRIMITIVES or isinstance(value, _PRIMITIVES):
            plain[key] = value
        elif getattr(value, "shape", None) == () and hasattr(value, "item"):
            plain[key] = value.item()  # a numpy or torch scalar: the same number
        else:
            kind = type(value).__name__
            raise bad(f"tag {key!r} of tags[{at}] is a {kind}; tags are str, int, float, bool or None", "tags")
    for key in _TYPED_TAGS.keys() & plain.keys():
        if plain[key] is not None and type(plain[key]) not in _TYPED_TAGS[key]:
            kinds = " or ".join(kind.__name__ for kind in _TYPED_TAGS[key])
            raise bad(f"tag {key!r} of tags[{at}] must be {kinds}, not {plain[key]!r}", key)
    return plain


def field_columns(fields: Any, n: int) -> TensorDict | None:
    """Check a TensorDict, or a plain dict of columns, against the number of samples."""
    if fields is None:
        return None
    if isinstance(fields, TensorDictBase) and not isinstance(fields, NonTensorStack):
        if not fields.batch_size or fields.batch_size[0] != n:
            raise bad(f"fields has batch size {tuple(fields.batch_size)} for {n} samples", "fields")
        if isinstance(fields, LazyStackedTensorDict) and n:
            fields = unstacked(fields)
        for key in fields.keys():  # noqa: SIM118 - a TensorDict iterates over rows
            if not isinstance(key, str) or not key:
                raise bad(f"fields has the key {key!r}; field names are non-empty strings", "fields")
        return cast("TensorDict", fields)
    if isinstance(fields, Mapping):
        names(fields, "fields")
        return cast("TensorDict", fields)  # a plain dict of columns serves as well; each is checked when it is packed
    raise bad(f"fields must be a TensorDict, not {type(fields).__name__}", "fields")
