"""Errors on the wire: by name there, typed here. What a host may say is a closed list."""

from __future__ import annotations

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

__all__ = ["describe", "restore"]

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
    """Code, text and retry_after_s of an error, as they travel."""
    kind = next((name for name, cls in _KINDS.items() if type(err) is cls), None)
    if kind is None:
        kind = "DataPlaneUnavailable" if isinstance(err, DataPlaneClosed) else "DataPlaneReadError"
    return kind, err.message, getattr(err, "retry_after_s", None)


def restore(code: str, text: str, retry_after_s: float | None, *, host: str, port: int | None) -> DataPlaneError:
    """Make the error again."""
    kind = _KINDS.get(code, DataPlaneReadError)
    if kind is DataPlaneNotReady:
        return DataPlaneNotReady(text, retry_after_s=retry_after_s, host=host, port=port)
    return kind(text, host=host, port=port)
