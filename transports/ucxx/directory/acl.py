"""What a user of the server needs to take part in a plane, and no more.

A plane's user can read and write the keys and channels of its own namespace. It cannot load, replace or remove
functions (they would run with the rights of whoever calls them, also those of other planes), run scripts of its own,
list the server's keys, or change the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from redis.exceptions import NoPermissionError

from .link import Link
from .settings import DirectorySettings

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["COMMANDS", "acl_rules", "excess_rights", "install_functions"]

#: Commands that clients send, and those that the functions call: Valkey checks both against the caller's rights. INFO
#: tells the server's version and its maxmemory-policy.
COMMANDS: Sequence[str] = (
    *(
        "exists",
        "expire",
        "fcall",
        "get",
        "hdel",
        "hget",
        "hgetall",
        "hkeys",
        "hlen",
        "hmget",
        "hscan",
        "hset",
        "hvals",
    ),
    *("info", "ping", "publish", "sadd", "set", "sismember", "smembers", "srem", "subscribe", "time", "unlink"),
    *("unsubscribe", "zadd", "zmscore", "zpopmin", "zrange", "zrangebyscore", "zrem"),
)
#: What would let a user reach beyond its plane, as commands that change nothing.
_BEYOND: Sequence[tuple[str, ...]] = (
    ("FUNCTION", "LIST", "LIBRARYNAME", "asyncdp-none"),
    ("EVAL", "return 0", "0"),
    ("CONFIG", "GET", "asyncdp-none"),
    ("SCAN", "0", "COUNT", "1", "MATCH", "asyncdp-none"),
)


def acl_rules(namespace: str) -> list[str]:
    """Return the rules for ``ACL SETUSER name on >password ...``: the least that clients and slot hosts need.

    Args:
        namespace: Of the plane, as in the settings.
    """
    return ["resetkeys", f"~{namespace}:*", "resetchannels", f"&{namespace}:*", "-@all", *(f"+{c}" for c in COMMANDS)]


async def install_functions(url: str, namespace: str) -> None:
    """Load a plane's functions, as an administrator: its own users may not.

    Raises:
        redis.exceptions.RedisError, ConnectionRefusedError: As the server says.
    """
    link = Link(url, DirectorySettings(namespace=namespace))
    try:
        await link.load()
    finally:
        await link.close()


async def excess_rights(link: Link) -> list[str]:
    """Return the commands that this connection's user may send although no plane needs them."""
    replies = await link.pipeline(_BEYOND)
    return [
        command[0] for command, reply in zip(_BEYOND, replies, strict=True) if not isinstance(reply, NoPermissionError)
    ]
