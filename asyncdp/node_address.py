"""Finds the IP address at which other machines reach this one."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator

__all__ = ["node_address"]

#: Destinations to look up in the routing table; nothing is sent to them. They are reserved for documentation (RFC 5737,
#: RFC 3849), so they belong to no host, and are routed like any other address.
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


def node_address() -> str:
    """Return this process' own routable IP address, IPv4 preferred, or ``""`` where it has none.

    Loopback and link-local addresses (169.254.0.0/16, fe80::/10) are never returned, since a process on another machine
    could not connect to them. The address is the one that the kernel would send from, or, if there is no route, one
    that the host's name resolves to.
    """
    for candidate in (*_routed(), *_named()):
        if _is_routable(candidate):
            return candidate
    return ""


def _routed() -> Iterator[str]:
    """Yield the source addresses that the routing table chooses."""
    for family, elsewhere in _ELSEWHERE:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((elsewhere, 9))  # a datagram socket only looks up the route
                yield probe.getsockname()[0]
        except OSError:
            continue


def _named() -> Iterator[str]:
    """Yield the addresses of the host's own name, IPv4 first."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_DGRAM)
    except OSError:
        return
    for family, _, _, _, address in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        if family in (socket.AF_INET, socket.AF_INET6):
            yield str(address[0])


def _is_routable(text: str) -> bool:
    """Return whether another machine can reach this address."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return not (address.is_loopback or address.is_link_local or address.is_unspecified or address.is_multicast)
