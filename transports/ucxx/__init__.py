"""The UCXX backend: slot hosts serve payload; a directory in Valkey records where it lies and who claimed it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# The transport is imported on first use, because the directory alone needs no ucxx.
__all__ = ["UCXXTransport"]


def __getattr__(name: str) -> Any:
    if name == "UCXXTransport":
        return import_module("asyncdp.transports.ucxx.transport").UCXXTransport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
