"""The choice of the connection that makes room for a new one, among those that have not proved themselves."""

from __future__ import annotations

import ipaddress
import secrets
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, TypeVar

__all__ = ["source_of", "to_evict"]

_NETWORK_BITS: Final = 64  # of an IPv6 address: one machine may use all addresses of such a network
#: One in so many may be chosen, the oldest: a client that authenticates while few others come is not among them.
_OLDEST: Final = 4

K = TypeVar("K")


@lru_cache(maxsize=1024)
def source_of(peer: str) -> str:
    """Return what counts as one source: an IPv4 address, an IPv6 network of 64 bits, or all of loopback."""
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return "loopback" if address.is_loopback else str(int(address) >> _NETWORK_BITS)
        address = address.ipv4_mapped
    return "loopback" if address.is_loopback else str(address)


def to_evict(sources: Mapping[K, str]) -> K:
    """Choose one of the connections, given the source of each, the oldest first.

    It is chosen at random among the oldest quarter of those that belong to the largest sources.

    So strangers at other addresses close no connection of a client, however many they are at each. Those at its own
    address do only where many come while it authenticates, and cannot choose which one they close.
    """
    counts = Counter(sources.values())
    most = max(counts.values())
    largest = [connection for connection, source in sources.items() if counts[source] == most]
    return largest[secrets.randbelow(max(1, len(largest) // _OLDEST))]
