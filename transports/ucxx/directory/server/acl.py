"""Access control: the minimal rights of a server's user for one plane.

A plane's user can read and write the keys and channels of its own namespace. It cannot load, replace or remove
functions (which run with the rights of their callers, including those of other planes), run scripts, list the server's
keys, or change the server's configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from redis.exceptions import NoPermissionError

from ..settings import DirectorySettings
from .link import DirectoryLink

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["COMMANDS", "acl_rules", "excess_rights", "install_functions"]

#: Commands that clients send or the functions call: Valkey checks both against the caller's rights. INFO returns the
#: server's version and its maxmemory-policy.
COMMANDS: Sequence[str] = (
    *(
        "exists",
        "expire",
        "fcall",
        "get",
        "hdel",
        "hget",
        "hgetall",
        "hlen",
        "hmget",
        "hscan",
        "hset",
        "hvals",
    ),
    *("info", "ping", "publish", "sadd", "set", "sismember", "smembers", "srem", "subscribe", "time", "unlink"),
    *("unsubscribe", "zadd", "zmscore", "zpopmin", "zrange", "zrangebyscore", "zrem"),
)
#: Commands without side effects whose permission shows that a user can reach beyond its plane.
_BEYOND: Sequence[tuple[str, ...]] = (
    ("FUNCTION", "LIST", "LIBRARYNAME", "asyncdp-none"),
    ("EVAL", "return 0", "0"),
    ("CONFIG", "GET", "asyncdp-none"),
    ("SCAN", "0", "COUNT", "1", "MATCH", "asyncdp-none"),
)


def acl_rules(namespace: str) -> list[str]:
    """Return the rules for ``ACL SETUSER name on >password ...``: the minimum that clients and slot hosts need.

    Args:
        namespace: Namespace of the plane, as in the settings.
    """
    return ["resetkeys", f"~{namespace}:*", "resetchannels", f"&{namespace}:*", "-@all", *(f"+{c}" for c in COMMANDS)]


async def install_functions(url: str, namespace: str) -> None:
    """Load a plane's functions as an administrator, since the plane's own users may not.

    Raises:
        redis.exceptions.RedisError: The server refuses the command or the connection breaks.
        ConnectionRefusedError: The server cannot be reached.
    """
    link = DirectoryLink(url, DirectorySettings(namespace=namespace), setting="--directory")
    try:
        await link.load()
    finally:
        await link.close()


async def excess_rights(link: DirectoryLink) -> list[str]:
    """Return the commands that this connection's user may send although a plane does not need them."""
    replies = await link.pipeline(_BEYOND)
    return [
        command[0] for command, reply in zip(_BEYOND, replies, strict=True) if not isinstance(reply, NoPermissionError)
    ]
