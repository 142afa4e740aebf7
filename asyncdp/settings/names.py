"""Errors of settings name them as the user wrote them, and say which names and values there are."""

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

__all__ = ["check_keys", "convert", "named", "no_such", "not_one_of", "plain_mapping"]

S = TypeVar("S", bound=msgspec.Struct)

#: ``layers.slot_retry.max_attempts``: no key lies deeper; what does is a value, its owner's to check.
DEPTH = 3
#: Values that are kept as they are, with the None that they may hold: what attach_config() filled in.
KEPT = frozenset({"endpoints"})


@contextmanager
def named(**settings: str) -> Iterator[None]:
    """Put a user's names into the ValueError of what is made of settings: ``named(base_s="quarantine_s")``."""
    try:
        yield
    except ValueError as err:
        names = re.compile(rf"\b({'|'.join(settings)})\b")
        raise ValueError(names.sub(lambda found: settings[found[1]], str(err))) from err


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def no_such(
    path: str, known: Iterable[str], *, problem: str = "no such key", homes: Mapping[str, str] | None = None
) -> ValueError:
    """Return the error for a name that nobody knows.

    Args:
        path: The name with what it lies in: ``ucxx.host.arena_byte``.
        known: The names that there are in its place.
        problem: What is wrong, in words.
        homes: Where else names belong: ``{"max_attempts": "layers.slot_retry.max_attempts"}``.
    """
    names = list(known)
    last = path.rpartition(".")[2]
    home = (homes or {}).get(last)
    near = f"; did you mean {home!r}?" if home else _nearest(last, names)
    return ValueError(f"{path}: {problem}{near} (there are: {', '.join(names)})")


def not_one_of(path: str, value: Any, known: Iterable[str], of: str = "") -> ValueError:
    """Return the error for a value that is none of those that there are; ``of`` says for what they are."""
    values = list(known)
    near = _nearest(value, values) if isinstance(value, str) else ""
    listed = ", ".join(map(repr, values))
    return ValueError(f"{path}: {value!r:.80} is not one of {listed}{of}{near}")


def plain_mapping(values: Mapping[Any, Any], path: str = "") -> dict[Any, Any]:
    """Return a mapping as dicts, lists and plain values, without the keys whose value is None.

    OmegaConf's configs, paths and members of enumerations become what YAML would have given.

    Raises:
        ValueError: A value cannot be read: an interpolation of OmegaConf's, or a mandatory value that is missing.
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
    """Check what msgspec has no name for: keys that are no strings, and layers without a mapping.

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
    """Make a struct of settings of a mapping that a user wrote.

    Args:
        values: The mapping.
        kind: The struct. The check of its ``__post_init__``, which raises ValueError, is part of it.
        path: What the mapping is called: ``ucxx.host``.
        homes: As :func:`no_such` takes it.
        origins: Under which other names keys were given: ``{"storage_capacity": "simple.storage_capacity"}``.

    Raises:
        ValueError: A key is unknown, missing or ill-typed; the message begins with its name.
    """
    check_keys(values, f"{path}." if path else "")
    _check_names(values, kind, path, homes)
    try:
        return msgspec.convert(dict(values), kind)
    except msgspec.ValidationError as err:
        raise ValueError(_message(str(err), path, origins or {})) from None


@lru_cache(maxsize=64)
def _hints_of(kind: type) -> dict[str, Any]:
    """Types of a struct's settings, which are evaluated from text: a millisecond, and a client has several structs."""
    return get_type_hints(kind)


def _check_names(values: Mapping[str, Any], kind: type, path: str, homes: Mapping[str, str] | None) -> None:
    """Check keys and the values of Literals, in nested structs too: msgspec does not say which there are."""
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
    """Put the key's name first: ``Expected `int`, got `str` - at `$.a.b``` becomes ``a.b: expected int, got str``."""
    what, _, where = text.partition(" - at `")
    inner = where.rstrip("`").removeprefix("$").removeprefix(".")
    named = re.search(r"missing required field `([^`]+)`", what)
    key = ".".join(filter(None, (path, origins.get(inner, inner), named and named[1])))
    if named:
        return f"{key}: required key is missing"
    words = what.replace("`", "").replace(" | null", "").replace("object", "mapping").replace("array", "list")
    if re.match(r"[a-z_]+: ", words):  # of a __post_init__, which begins with the key itself
        return f"{key}.{words}" if key else words
    return f"{key or 'config'}: {words[:1].lower()}{words[1:]}"
