"""Under which address a slot host is published: where others reach what it listens at."""

from __future__ import annotations

import ipaddress

from asyncdp.errors import DataPlaneUnavailable
from asyncdp.node_address import node_address

__all__ = ["published_address"]


def published_address(bind: str, publish: str = "") -> str:
    """Return the address that clients are told.

    Args:
        bind: What the ports listen at: an address, a name, or a wildcard (``0.0.0.0``, ``::``).
        publish: What to say instead of it; behind a translation of addresses only a person knows.

    Raises:
        DataPlaneUnavailable: A wildcard is no address to be reached at, and this machine knows no other of its own.
    """
    if publish:
        if _wildcard(publish) is not None:
            raise _unknown(f"publish {publish} is a wildcard, and no address that others can connect to")
        return publish
    wildcard = _wildcard(bind)
    if wildcard is None:
        return bind
    own = node_address()
    # asyncio listens at one family only: an address of the other leads nowhere.
    if own and ipaddress.ip_address(own).version == wildcard.version:
        return own
    raise _unknown(
        f"bind {bind} listens everywhere, and this machine has no IPv{wildcard.version} address that others can reach:"
        " say in publish where they find it, or bind 127.0.0.1 for this machine alone"
    )


def _wildcard(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return address if address.is_unspecified else None


def _unknown(text: str) -> DataPlaneUnavailable:
    return DataPlaneUnavailable(text, retryable=False, blames_port=False)
