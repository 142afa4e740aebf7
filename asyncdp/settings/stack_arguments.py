"""Checks the arguments of ``stack()`` before any layer is made; errors name them as the user does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from asyncdp.protocol import VERBS

__all__ = ["client", "factories", "options", "setting"]

#: Settings that may be 0, which disables them.
_MAY_BE_ZERO = ("outage_patience_s",)


def setting(value: Any, kind: str, path: str) -> Any:
    """Return a setting after checking it against the annotation ``kind``; further checks are its owner's.

    Raises:
        ValueError: The value has the wrong type or is not positive; the message begins with ``path``.
    """
    types = {"int": (int,), "float": (int, float)}.get(kind)
    if path.rpartition(".")[2] in _MAY_BE_ZERO and type(value) in (int, float) and value == 0:
        return value
    if types is not None and (isinstance(value, bool) or not isinstance(value, types) or not value > 0):
        msg = f"{path}: must be a positive {'whole number' if kind == 'int' else 'number'}, not {value!r}"
        raise ValueError(msg)
    if kind == "float" and isinstance(value, int) and value > sys.float_info.max:
        msg = f"{path}: an integer of {value.bit_length()} bits is too large for a number of seconds"
        raise ValueError(msg)
    if kind == "ErrorTable":
        _check_table(value, path)
    return value


def _check_table(table: Any, path: str) -> None:
    wanted = f"{path}: must be a sequence of pairs (exception type or class name, callable that makes the error)"
    if isinstance(table, (str, bytes)) or not isinstance(table, Sequence):
        msg = f"{wanted}, not {table!r:.80}"
        raise ValueError(msg)  # noqa: TRY004 - errors of settings are ValueErrors
    for row in table:
        match row:
            case (str(), make) if callable(make):
                continue
            case (type() as kind, make) if issubclass(kind, BaseException) and callable(make):
                continue
        msg = f"{wanted}; {row!r:.80} is not such a pair"
        raise ValueError(msg)


def options(*, clock: Any, rng: Any, on_event: Any, **seconds: Any) -> None:
    """Check the arguments of ``stack()`` that are not settings of a layer; None means the default.

    Raises:
        ValueError: A value has the wrong type or is out of range; the message begins with its name.
    """
    for name, value in seconds.items():
        if value is not None:
            setting(value, "float", name)
    for name, value, methods in (("clock", clock, ("now", "time", "sleep")), ("rng", rng, ("uniform", "randrange"))):
        lacking = [method for method in methods if value is not None and not callable(getattr(value, method, None))]
        if lacking:
            msg = f"{name}: needs the methods {', '.join(methods)}; {value!r:.80} has no {lacking[0]}"
            raise ValueError(msg)
    if not (on_event is None or callable(on_event)):
        msg = f"on_event: must be callable, not {on_event!r:.80}"
        raise ValueError(msg)


def factories(layers: Any) -> list[Callable[..., Any]]:
    """Return ``layers`` as a list.

    Raises:
        TypeError: It is no list of layers, or one of them cannot be called; the message says which.
    """
    if isinstance(layers, (str, bytes)) or not isinstance(layers, Iterable):
        msg = f"layers must be a sequence of callables (inner) -> client, not {layers!r:.80}"
        raise TypeError(msg)
    made = list(layers)
    for at, factory in enumerate(made):
        if not callable(factory):
            msg = f"layers[{at}] must be a layer class or another callable (inner) -> client, not {factory!r:.80}"
            raise TypeError(msg)
    return made


def client(value: Any, what: str) -> None:
    """Check that an object has at least one of the verbs of a client.

    Raises:
        TypeError: It is a class, or has no verb; the message contains ``what``, which says where it came from.
    """
    if isinstance(value, type):
        msg = f"{what} is the class {value.__name__}, not a client: give it as {value.__name__}(...)"
        raise TypeError(msg)
    if not any(callable(getattr(value, verb, None)) for verb in VERBS):
        kind = "None" if value is None else f"of type {type(value).__name__}"
        msg = f"{what} is {kind}, no client: it has none of the verbs, such as put_samples or get_samples"
        raise TypeError(msg)
