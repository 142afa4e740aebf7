"""Which slot host gets the next put. No I/O; time and the random source are handed in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..directory import HostInfo

__all__ = ["Placing", "RandomSource"]

#: Hosts whose arenas are used within the same eighth count as equal and take turns: heartbeats are a second apart, and
#: clients that all ran to the least used one would flood it between two of them.
USE_STEPS: Final = 8
#: A host of which less is free is left for others, near or not: a put there would wait for space.
LEAST_FREE: Final = 1 / 32
#: So long a host that said it was full comes last, in seconds: as long as its heartbeats may not yet tell of it.
FULL_S: Final = 1.0


class RandomSource(Protocol):
    """What is asked of ``random.Random``."""

    def random(self) -> float:
        """Return a number from 0 up to 1."""


@dataclass(slots=True)
class _Seen:
    """What this client knows of a host beside its latest heartbeat.

    Attributes:
        turns: Puts that it got; begins at a random part of one, so that clients do not all begin with the same host.
        age_s, load: The heartbeat.
        nbytes: What this client reserved since.
        full_until: When it may be asked again for space.
    """

    turns: float
    age_s: float = 0.0
    load: float = 0.0
    nbytes: int = 0
    full_until: float = float("-inf")


class Placing:
    """Orders hosts for puts: those with space, near ones, less used ones; equals take turns."""

    def __init__(self) -> None:
        """Nobody has had a turn."""
        self._seen: dict[str, _Seen] = {}

    def order(self, hosts: Sequence[HostInfo], boot_id: str, now: float, rng: RandomSource) -> list[HostInfo]:
        """Order hosts, the best first; it is taken to get the put.

        Args:
            hosts: As of their latest heartbeats.
            boot_id: Of this machine.
            now: Monotonic seconds.
            rng: Makes clients begin with different hosts.
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
            # A host that is new begins where the others are: it must not get every put until it has as many.
            least = min((int(known.turns) for known in self._seen.values()), default=0)
            return _Seen(least + rng.random(), host.age_s, host.load)
        if host.age_s < seen.age_s or host.load != seen.load:  # a heartbeat came, which counts what was put
            seen.nbytes = 0
        seen.age_s, seen.load = host.age_s, host.load
        return seen

    def reserved(self, host_id: str, nbytes: int) -> None:
        """Note what a host granted to this client; its next heartbeat will count it."""
        seen = self._seen.get(host_id)
        if seen is not None:
            seen.nbytes += nbytes

    def full(self, host_id: str, now: float) -> None:
        """Note that a host had no space for this client."""
        seen = self._seen.get(host_id)
        if seen is not None:
            seen.full_until = now + FULL_S
