"""The server-side functions of the directory, in Lua."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

__all__ = ["FORMAT", "source", "version"]

#: Version of the data format in the server, which head.lua describes; to be changed when other releases would misread
#: the data. A plane without a stored version has version 1.
FORMAT = 2

#: Files of the library, each after those that it depends on.
PARTS = ("head", "queue", "groups", "ready", "publish", "claim", "clear", "list", "snapshot", "host", "tail")
LIBRARY = "asyncdp"


@cache
def _text() -> str:
    here = files(__name__)
    return "\n".join((here / f"{part}.lua").read_text() for part in PARTS)


@cache
def version(namespace: str) -> str:
    """Return the version of a plane's library: a hash of its text and namespace.

    Clients of several versions may use one server at a time; each calls its own functions. Planes on one server do not
    share a library, so loading or removing the library of one plane never affects another.
    """
    return hashlib.sha256(f"{namespace}\n{_text()}".encode()).hexdigest()[:12]


@cache
def source(namespace: str) -> str:
    """Return the source of the library, as FUNCTION LOAD takes it."""
    number = version(namespace)
    return f"#!lua name={LIBRARY}_{number}\n" + _text().replace("@VERSION@", number)
