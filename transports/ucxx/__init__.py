"""The UCXX backend: slot hosts serve payload, a directory in Valkey says where it lies and who claimed it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Loaded on first use: the directory alone needs no ucxx.
__all__ = ["UCXXTransport"]


def __getattr__(name: str) -> Any:
    if name == "UCXXTransport":
        return import_module("asyncdp.transports.ucxx.transport").UCXXTransport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
