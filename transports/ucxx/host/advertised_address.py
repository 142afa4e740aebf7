"""Choose the address that a slot host advertises: the one at which clients can connect to its ports."""

from __future__ import annotations

import ipaddress

from asyncdp.errors import DataPlaneUnavailable
from asyncdp.node_address import node_address

__all__ = ["advertised_address"]


def advertised_address(bind: str, publish: str = "") -> str:
    """Return the address that the host advertises to clients.

    Args:
        bind: Address that the ports listen at: an IP address, a host name, or a wildcard (``0.0.0.0``, ``::``).
        publish: Address to advertise instead of ``bind``, for example behind NAT; empty: derive it from ``bind``.

    Raises:
        DataPlaneUnavailable: ``publish`` is a wildcard, or ``bind`` is one and this machine has no address of that IP
            version that other machines can reach.
    """
    if publish:
        if _wildcard(publish) is not None:
            raise _unknown(f"publish {publish} is a wildcard, and no address that others can connect to")
        return publish
    wildcard = _wildcard(bind)
    if wildcard is None:
        return bind
    own = node_address()
    # asyncio listens on one address family only; an address of the other family would not be reachable.
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
