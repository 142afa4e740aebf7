"""Placement: which slot host gets the next put. The code does no I/O; time and randomness are arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..directory import HostInfo

__all__ = ["Placing"]

#: Steps of arena use; hosts within the same eighth count as equal and are used in rotation. Heartbeats are a second
#: apart, and between two of them all clients would otherwise overload the least used host.
USE_STEPS: Final = 8
#: Least free share of an arena; a host with less comes after all others, because a put there would wait for space.
LEAST_FREE: Final = 1 / 32
#: Seconds for which a host is deprioritised after it reported full. Heartbeats lag by up to one second, so its
#: advertised free space may be wrong until then.
FULL_S: Final = 1.0


class RandomSource(Protocol):
    """The part of ``random.Random`` that placement needs."""

    def random(self) -> float:
        """Return a random number from 0 (inclusive) to 1 (exclusive)."""


@dataclass(slots=True)
class _Seen:
    """Records what this client knows of a host in addition to its latest heartbeat.

    Attributes:
        turns: Number of puts that it got, plus a random fraction, so that clients do not all start with the same host.
        age_s, load: Age in seconds and load in bytes of the latest heartbeat.
        nbytes: Bytes that this client has reserved since that heartbeat.
        full_until: Monotonic time until which the host comes last, because it reported full.
    """

    turns: float
    age_s: float = 0.0
    load: float = 0.0
    nbytes: int = 0
    full_until: float = float("-inf")


class Placing:
    """Orders hosts for puts: first those with space, then those on this machine, then less used ones, in rotation."""

    def __init__(self) -> None:
        """Start with no knowledge of hosts."""
        self._seen: dict[str, _Seen] = {}

    def order(self, hosts: Sequence[HostInfo], boot_id: str, now: float, rng: RandomSource) -> list[HostInfo]:
        """Order hosts, the best first, and count a put for that one.

        Args:
            hosts: Hosts as of their latest heartbeats.
            boot_id: Boot id of this machine.
            now: Monotonic time, in seconds.
            rng: Random source; makes clients start with different hosts.
        """
        self._seen = {host.id: self._heard(host, rng) for host in hosts}

        def key(host: HostInfo) -> tuple[bool, bool, int, float]:
            seen = self._seen[host.id]
            whole = max(1.0, host.free_bytes + host.load)
            used = min(1.0, (host.load + seen.nbytes) / whole)
            no_space = now < seen.full_until or 1 - used < LEAST_FREE
            return no_space, host.boot_id != boot_id, int(used * USE_STEPS), seen.turns

        ordered = sorted(hosts, key=key)
        if ordered:
            self._seen[ordered[0].id].turns += 1
        return ordered

    def _heard(self, host: HostInfo, rng: RandomSource) -> _Seen:
        seen = self._seen.get(host.id)
        if seen is None:
            # A new host starts with the least count of the others; else it would get every put until it has as many.
            least = min((int(known.turns) for known in self._seen.values()), default=0)
            return _Seen(least + rng.random(), host.age_s, host.load)
        if host.age_s < seen.age_s or host.load != seen.load:  # a new heartbeat, which includes what was put
            seen.nbytes = 0
        seen.age_s, seen.load = host.age_s, host.load
        return seen

    def reserved(self, host_id: str, nbytes: int) -> None:
        """Add bytes that a host granted to this client; the host's next heartbeat will include them."""
        seen = self._seen.get(host_id)
        if seen is not None:
            seen.nbytes += nbytes

    def full(self, host_id: str, now: float) -> None:
        """Deprioritise a host for ``FULL_S`` seconds from ``now``, because it reported full."""
        seen = self._seen.get(host_id)
        if seen is not None:
            seen.full_until = now + FULL_S
