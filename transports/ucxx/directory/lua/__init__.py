"""The server-side functions of the directory, in Lua."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

__all__ = ["FORMAT", "LIBRARY", "source", "version"]

#: Of what is kept in the server, as head.lua describes it: to be changed when another release would misread it. A plane
#: that says nothing is of version 1.
FORMAT = 1

#: In the order in which they need each other.
PARTS = ("head", "ready", "publish", "claim", "clear", "list", "host", "tail")
LIBRARY = "asyncdp"


@cache
def _text() -> str:
    here = files(__name__)
    return "\n".join((here / f"{part}.lua").read_text() for part in PARTS)


@cache
def version(namespace: str) -> str:
    """Return the version of a plane's library: a hash of its text and namespace.

    Clients of several versions may use one server at a time; each calls its own functions. Planes that share a server
    share no library: to load or remove one plane's never touches another's.
    """
    return hashlib.sha256(f"{namespace}\n{_text()}".encode()).hexdigest()[:12]


@cache
def source(namespace: str) -> str:
    """Return what FUNCTION LOAD takes."""
    number = version(namespace)
    return f"#!lua name={LIBRARY}_{number}\n" + _text().replace("@VERSION@", number)
