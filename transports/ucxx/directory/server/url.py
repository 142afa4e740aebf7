"""The check of a directory's URL; its errors tell nothing of the URL, which may hold a password."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from redis.asyncio.connection import parse_url

__all__ = ["check_url"]

_SCHEMES: Final = ("redis", "rediss", "unix")
_ESCAPE: Final = (
    "in user and password write / as %2F, # as %23, ? as %3F, @ as %40, : as %3A, [ as %5B, ] as %5D, % as %25"
)


def check_url(url: str, setting: str) -> None:
    """Check a directory's URL.

    A character of the password that is not escaped would make the rest of it a port, a path or an option, which errors
    of a parser or of a connection name. So the errors here are those of this function alone.

    Raises:
        ValueError: The URL cannot be used; the message names ``setting``, which holds the URL, and says what a URL
            looks like; it has no part of this one.
    """
    problem = _problem(url)
    if problem is not None:
        raise ValueError(f"{setting}: {problem}")


def _problem(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        if parts.scheme not in _SCHEMES or "://" not in url:
            return "a URL begins with redis://, rediss:// or unix://, then come user:password@ and the place"
        rest = parts.path + parts.query + parts.fragment
        if parts.scheme != "unix":
            database = parts.path.strip("/")
            if "@" in rest or parts.fragment or (database and not database.isdecimal()):
                return f"after host and port comes /DB, a number, or nothing; {_ESCAPE}"
            if parts.port == 0:
                return "a port is a number from 1 to 65535"
        elif (parts.netloc and "@" not in parts.netloc) or parts.fragment or not parts.path:
            return f"unix:// is followed by [user:password@] and the absolute path of a socket; {_ESCAPE}"
        parse_url(url)
    except Exception:  # noqa: BLE001 - a parser's error names the part of the URL that it cannot parse
        return f"its host, port or an option cannot be read; {_ESCAPE}"
    return None
