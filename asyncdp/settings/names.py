"""Checks settings; errors name a setting as the user wrote it, and list the valid names and values."""

from __future__ import annotations

import difflib
import enum
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from asyncdp.rows.plain_values import plain_tree

__all__ = ["as_mapping", "check_keys", "convert", "named", "nearest", "no_such", "not_one_of", "plain_mapping"]

S = TypeVar("S", bound=msgspec.Struct)

#: Depth of the deepest key, ``layers.slot_retry.max_attempts``; mappings below it are values that their owner checks.
DEPTH = 3
#: Keys whose values are kept as they are, including None in them, since attach_config() filled them in.
KEPT = frozenset({"endpoints"})


@contextmanager
def named(**settings: str) -> Iterator[None]:
    """Replace argument names by users' names in a ValueError of the body: ``named(base_s="quarantine_s")``."""
    try:
        yield
    except ValueError as err:
        names = re.compile(rf"\b({'|'.join(settings)})\b")
        raise ValueError(names.sub(lambda found: settings[found[1]], str(err))) from err


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the known name that is most like ``name``; empty where none is."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def no_such(
    path: str, known: Iterable[str], *, problem: str = "no such key", homes: Mapping[str, str] | None = None
) -> ValueError:
    """Return the error for an unknown name.

    Args:
        path: Full path of the name: ``ucxx.host.arena_byte``.
        known: The valid names in its place.
        problem: Text that says what is wrong.
        homes: Paths of names that belong elsewhere: ``{"max_attempts": "layers.slot_retry.max_attempts"}``.
    """
    names = list(known)
    last = path.rpartition(".")[2]
    home = (homes or {}).get(last)
    near = f"; did you mean {home!r}?" if home else nearest(last, names)
    return ValueError(f"{path}: {problem}{near} (there are: {', '.join(names)})")


def not_one_of(path: str, value: Any, known: Iterable[str], of: str = "") -> ValueError:
    """Return the error for a value that is not one of ``known``; ``of`` is a text that says what they apply to."""
    values = list(known)
    near = nearest(value, values) if isinstance(value, str) else ""
    listed = ", ".join(map(repr, values))
    return ValueError(f"{path}: {value!r:.80} is not one of {listed}{of}{near}")


def as_mapping(value: Any) -> Any:
    """Return an object with the methods of a mapping (a config of another library) as one; any other value as it is."""
    if isinstance(value, (Mapping, type)):
        return value
    if not (callable(getattr(value, "keys", None)) and hasattr(value, "__getitem__")):
        return value
    return {key: value[key] for key in value.keys()}  # noqa: SIM118 - it may iterate over something else


def plain_mapping(values: Mapping[Any, Any], path: str = "") -> dict[Any, Any]:
    """Return a mapping as dicts, lists and plain values, without keys whose value is None.

    OmegaConf configs, paths and enum members are converted to the values that YAML would have.

    Raises:
        ValueError: A value of an OmegaConf config cannot be resolved: an interpolation, or a missing mandatory value.
    """
    try:
        items = list(values.items())
    except Exception as err:
        raise ValueError(f"{path or 'config'}: cannot be read: {err}") from err
    return {
        plain_tree(key): _plain(value, f"{path}.{key}" if path else str(key))
        for key, value in items
        if value is not None
    }


def _plain(value: Any, path: str) -> Any:
    if path.rpartition(".")[2] in KEPT:
        return value
    value = as_mapping(value)
    if isinstance(value, Mapping):
        return plain_mapping(value, path)
    if isinstance(value, enum.Enum):
        return plain_tree(value.value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, tuple)):
        return [_plain(one, f"{path}[{at}]") for at, one in enumerate(value)]
    return plain_tree(value)


def check_keys(config: Mapping[Any, Any], path: str = "", depth: int = DEPTH) -> None:
    """Check what msgspec's errors would not name: keys that are no strings, and layers whose value is no mapping.

    Raises:
        ValueError: The message begins with the key.
    """
    for key, value in config.items():
        where = f"{path}{key if isinstance(key, str) else repr(key)}"
        if not isinstance(key, str):
            msg = f"{where}: keys are strings, this one is of type {type(key).__name__}"
            raise ValueError(msg)  # noqa: TRY004 - config errors are ValueErrors
        if path == "layers." and not isinstance(value, Mapping):
            msg = f"{where}: must be a mapping of the layer's settings, not {value!r:.80}"
            raise ValueError(msg)
        if isinstance(value, Mapping) and depth > 1:
            check_keys(value, f"{where}.", depth - 1)


def convert(
    values: Mapping[str, Any],
    kind: type[S],
    path: str = "",
    *,
    homes: Mapping[str, str] | None = None,
    origins: Mapping[str, str] | None = None,
) -> S:
    """Convert a user's mapping to a struct of settings.

    Args:
        values: The mapping.
        kind: Class of the struct; the checks of its ``__post_init__``, which raises ValueError, are applied too.
        path: Path of the mapping: ``ucxx.host``.
        homes: As for :func:`no_such`.
        origins: Other paths under which keys were given: ``{"storage_capacity": "simple.storage_capacity"}``.

    Raises:
        ValueError: A key is unknown, missing or has the wrong type; the message begins with its path.
    """
    check_keys(values, f"{path}." if path else "")
    _check_names(values, kind, path, homes)
    try:
        return msgspec.convert(dict(values), kind)
    except msgspec.ValidationError as err:
        raise ValueError(_message(str(err), path, origins or {})) from None


@lru_cache(maxsize=64)
def _hints_of(kind: type) -> dict[str, Any]:
    """Return the types of a struct's settings; evaluating the annotations takes a millisecond, so they are cached."""
    return get_type_hints(kind)


def _check_names(values: Mapping[str, Any], kind: type, path: str, homes: Mapping[str, str] | None) -> None:
    """Check keys and values of Literals, in nested structs too, since msgspec's errors do not list the valid ones."""
    hints = _hints_of(kind)
    before = f"{path}." if path else ""
    for key, value in values.items():
        if key not in hints:
            raise no_such(f"{before}{key}", hints, homes=homes)
        for part in (hints[key], *get_args(hints[key])):
            if isinstance(value, Mapping) and isinstance(part, type) and issubclass(part, msgspec.Struct):
                _check_names(value, part, f"{before}{key}", homes)
            elif get_origin(part) is Literal and isinstance(value, str) and value not in get_args(part):
                raise not_one_of(f"{before}{key}", value, get_args(part))


def _message(text: str, path: str, origins: Mapping[str, str]) -> str:
    """Move the key to the front: ``Expected `int`, got `str` - at `$.a.b``` becomes ``a.b: expected int, got str``."""
    what, _, where = text.partition(" - at `")
    inner = where.rstrip("`").removeprefix("$").removeprefix(".")
    named = re.search(r"missing required field `([^`]+)`", what)
    key = ".".join(filter(None, (path, origins.get(inner, inner), named and named[1])))
    if named:
        return f"{key}: required key is missing"
    words = what.replace("`", "").replace(" | null", "").replace("object", "mapping").replace("array", "list")
    if re.match(r"[a-z_]+: ", words):  # a message of __post_init__, which begins with the key
        return f"{key}.{words}" if key else words
    return f"{key or 'config'}: {words[:1].lower()}{words[1:]}"
