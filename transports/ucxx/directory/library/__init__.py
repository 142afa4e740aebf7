"""The server-side functions of the directory, in Lua."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

__all__ = ["LIBRARY", "source", "version"]

#: In the order in which they need each other.
PARTS = ("head", "ready", "publish", "claim", "clear", "list", "host", "tail")
LIBRARY = "asyncdp"


@cache
def _text() -> str:
    here = files(__name__)
    return "\n".join((here / f"{part}.lua").read_text() for part in PARTS)


@cache
def version() -> str:
    """Return the version of the library: a hash of its text, so that another text is another library.

    Clients of several versions may use one server at a time; each calls its own functions.
    """
    return hashlib.sha256(_text().encode()).hexdigest()[:12]


@cache
def source() -> str:
    """Return what FUNCTION LOAD takes."""
    return f"#!lua name={LIBRARY}_{version()}\n" + _text().replace("@VERSION@", version())
