"""Settings of a slot host."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..slots.table import OnFull

__all__ = ["HostSettings"]

Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
#: Default of ``max_slot_bytes``; in a smaller arena, the arena's size is the bound.
MAX_SLOT_BYTES = 256 << 20


class HostSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Configuration of a slot host.

    Attributes:
        host_id: Name of the host; it has to be the same at each start, so that the host finds its arena again.
        plane: Name of the plane; separates hosts of the same name in several planes on one machine.
        bind: Address that the ports listen at; by default loopback.
        publish: Address advertised to clients; empty: ``bind``, or this machine's address where ``bind`` is a wildcard.
        ports: Number of ports; clients rotate among several.
        first_port: Number of the first port; numbers in use are skipped. 0: the system chooses the numbers.
        arena_bytes: Bytes of shared memory for payloads, allocated at the start.
        unit_bytes: Allocation unit of payloads in bytes, a multiple of 4096. Each unit takes 128 bytes of metadata.
        max_slot_bytes: Largest payload of one slot, in bytes.
        rows_per_slot: Rows of one put that share a slot; None: as many as fit, which is fastest.
        on_full: What a full host does with a put: ``wait``, ``raise`` or ``overwrite_oldest``.
        adopt: Whether to adopt the arena of a previous incarnation.
        keep_arena: Whether to keep the arena after an orderly stop, for the next start to adopt.
        checksum: Whether replies carry a CRC-32 per slot (about 2 GB/s).
        inline_bytes: Largest payload in bytes that is sent in the frame itself, which saves the round trip of UCX.
        max_reply_bytes: Largest reply in bytes; clients have to ask again for the refs that a larger one left out.
        writing_share: Share of the arena that the reserved, unwritten slots of one client may take while it has several
            puts in progress, so that it cannot keep others from the arena. A single put may take all of it.
        held_bytes: Bytes of replies over 1 MiB, of all clients together, that are built or sent at a time; others wait.
            As much again is for requests that take over 1 MiB once they are decoded.
        idle_s: Seconds after which an idle connection is closed; clients replace theirs after half of it.
        greeting_s: Seconds that a peer may take to authenticate.
        beat_s: Seconds between two heartbeats to the directory.
        grace_s: Seconds for which an unpublished slot is kept beyond the longest put, by the directory's clock.
        reap_s: Seconds between two checks for hosts without a heartbeat for the directory's ``host_forget_s``.
        supervised: Whether a supervisor restarts the host when it dies: clients then wait for it even where its last
            heartbeat is old. ``asyncdp serve`` sets it for the hosts of its plane.
        drain_s: Seconds that running requests may take when the host stops.
        sweep_arenas_s: Seconds after which shared-memory segments of dead hosts are removed.
        devices: Network devices for UCX; None: all.
        watch_ucx_s: Interval in seconds of the check for misuse of the UCX listener. UCX is restarted, with all
            connections, where its thread was busy for two intervals or where more than 128 descriptors are
            unaccounted for; where that does not help, the host process restarts. 0: no check, for a process that does
            other work, which the check could mistake for misuse.
        ucx: Whether to offer UCX; without it only the lane and payloads in frames work.
    """

    host_id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    plane: str = ""
    bind: Annotated[str, msgspec.Meta(min_length=1)] = "127.0.0.1"
    publish: str = ""
    ports: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    first_port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 0
    arena_bytes: Positive = 1 << 30
    unit_bytes: Annotated[int, msgspec.Meta(ge=4096, multiple_of=4096)] = 16 << 10
    max_slot_bytes: Positive = MAX_SLOT_BYTES
    rows_per_slot: Positive | None = None
    on_full: OnFull = "wait"
    adopt: bool = True
    keep_arena: bool = True
    checksum: bool = False
    inline_bytes: Annotated[int, msgspec.Meta(ge=0, le=8 << 20)] = 32 << 10
    max_reply_bytes: Positive = 1 << 30
    writing_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    held_bytes: Positive = 1 << 30
    idle_s: Seconds = 120.0
    greeting_s: Seconds = 5.0
    beat_s: Seconds = 1.0
    grace_s: Seconds = 120.0
    reap_s: Seconds = 60.0
    supervised: bool = False
    drain_s: Seconds = 5.0
    sweep_arenas_s: Seconds = 3600.0
    devices: str | None = None
    watch_ucx_s: Annotated[float, msgspec.Meta(ge=0)] = 5.0
    ucx: bool = True

    def __post_init__(self) -> None:
        """Refuse combinations with which no slot could be stored or no port opened."""
        size = self.unit_bytes
        if self.arena_bytes < size:
            raise ValueError(f"arena_bytes: {self.arena_bytes} is smaller than one slot (unit_bytes: {size})")
        if self.max_slot_bytes > self.arena_bytes and self.max_slot_bytes != MAX_SLOT_BYTES:
            raise ValueError(
                f"max_slot_bytes: a slot of {self.max_slot_bytes} does not fit into arena_bytes ({self.arena_bytes})"
            )
        if self.first_port + self.ports > 1 << 16 and self.first_port:
            raise ValueError(f"first_port: {self.first_port} leaves no {self.ports} ports; 65535 is the last")
