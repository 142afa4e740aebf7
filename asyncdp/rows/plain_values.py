"""Converts names, tag values and numbers to the exact built-in types of Python.

A StrEnum, a numpy scalar or another subclass would be pickled with its class, and a process that cannot import the
class could not read a message with it. So the client converts these before anything is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["PLAIN", "plain", "plain_tree"]

#: The types of tag values.
PLAIN = frozenset((str, int, float, bool, type(None)))


def plain(value: Any) -> Any:
    """Return the same value as an exact str, int, float, bool or None.

    Subclasses (``StrEnum``, ``IntEnum``, ``numpy.str_``) and scalars of numpy and torch (including 0-d tensors) are
    converted to the value that they hold.

    Raises:
        TypeError: The value is none of these.
    """
    if type(value) in PLAIN:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    inner = _scalar(value)
    if inner is not value and isinstance(inner, (str, int, float, type(None))):
        return plain(inner)
    raise TypeError(f"a {type(value).__name__} is no str, int, float, bool or None")


def plain_tree(value: Any) -> Any:
    """Return a config with plain keys and values, in mappings and lists at any depth; other values stay as they are."""
    if isinstance(value, Mapping):
        return {plain_tree(key): plain_tree(inner) for key, inner in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(map(plain_tree, value))
    try:
        return plain(value)
    except TypeError:
        return value


def _scalar(value: Any) -> Any:
    """Return the value of a numpy or torch scalar, or anything else as it is."""
    try:
        return value.item() if value.shape == () else value
    except (AttributeError, RuntimeError, TypeError, ValueError):  # torch: a nested tensor has no shape, meta no item
        return value
