"""Conversion of errors to and from messages: by class name, of a fixed list of classes."""

from __future__ import annotations

import math
from typing import Final

from asyncdp.errors import (
    CorruptPayload,
    DataPlaneBadRequest,
    DataPlaneClosed,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneReadError,
    DataPlaneUnavailable,
    DataPlaneWriteError,
    StaleSlotError,
)

__all__ = ["describe", "printable", "restore"]

_MOST_CHARACTERS: Final = 1000

_KINDS: Final = {
    kind.__name__: kind
    for kind in (
        CorruptPayload,
        DataPlaneBadRequest,
        DataPlaneNotReady,
        DataPlaneReadError,
        DataPlaneUnavailable,
        DataPlaneWriteError,
        StaleSlotError,
    )
}


def describe(err: DataPlaneError) -> tuple[str, str, float | None]:
    """Return code, text and retry_after_s of an error, as a message contains them."""
    kind = type(err).__name__
    if _KINDS.get(kind) is not type(err):
        kind = "DataPlaneUnavailable" if isinstance(err, DataPlaneClosed) else "DataPlaneReadError"
    return kind, err.message[:_MOST_CHARACTERS], getattr(err, "retry_after_s", None)


def printable(text: str) -> str:
    """Return a peer's text as an error or a log line may show it: on one line, not long, without control characters."""
    cut = text[:_MOST_CHARACTERS]
    return "".join(letter if letter.isprintable() else " " for letter in cut) + "..." * (len(text) > len(cut))


def restore(code: str, text: str, retry_after_s: float | None, *, host: str, port: int | None) -> DataPlaneError:
    """Return the error that a message describes; an unknown code becomes DataPlaneReadError."""
    kind, text = _KINDS.get(code, DataPlaneReadError), printable(text)
    if kind is DataPlaneNotReady:
        waits = retry_after_s if retry_after_s is not None and 0.0 <= retry_after_s < math.inf else None
        return DataPlaneNotReady(text, retry_after_s=waits, host=host, port=port)
    return kind(text, host=host, port=port)
