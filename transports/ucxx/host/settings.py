"""Settings of a slot host."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..slots.table import OnFull

__all__ = ["HostSettings"]

Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
#: The default; an arena that is smaller bounds slots by itself.
MAX_SLOT_BYTES = 256 << 20


class HostSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """How a slot host stores and serves.

    Attributes:
        host_id: Its name; the same at each start, so that it finds its arena again.
        plane: Keeps hosts of one name in several planes on one machine apart.
        bind: Address that the ports listen at; loopback unless told otherwise.
        publish: Address that clients are told; empty: ``bind``, or where that is a wildcard this machine's own.
        ports: How many doors; several, so that rotation has somewhere to go.
        first_port: First number that is tried; a taken one is left out. 0: the system chooses.
        arena_bytes: Shared memory for payloads, allocated at the start.
        unit_bytes: Payloads take multiples of this; a multiple of 4096. Each unit costs 128 bytes beside.
        max_slot_bytes: Largest payload of one slot.
        rows_per_slot: Rows of one put that share a slot; None: as many as fit, which is fastest.
        on_full: ``wait``, ``raise`` or ``overwrite_oldest``.
        adopt: Whether to take over the arena of a former life.
        keep_arena: Whether the arena stays after an orderly end, for the next start to adopt.
        checksum: Whether replies carry a CRC-32 per slot (about 2 GB/s).
        inline_bytes: Payloads up to this travel in the frame itself: one round trip less than over UCX.
        max_reply_bytes: A longer reply is cut; what is left out is asked for again.
        writing_share: Part of the arena that one client may have reserved and not written while it has other puts under
            way: one that reserves and waits cannot keep all others out. A single put may take all of it.
        held_bytes: Replies over 1 MiB that are built or sent at a time, of all clients together; further ones wait.
        idle_s: A connection that asks nothing for so long is closed; clients replace theirs at half of it.
        greeting_s: How long a peer may take to prove that it knows the secret.
        beat_s: Pause between two heartbeats into the directory.
        grace_s: How much longer than any put may take an unpublished slot is kept, by the directory's clock.
        reap_s: Pause between two looks for hosts that have been silent for the directory's ``host_forget_s``.
        supervised: Whether somebody starts it again when it dies: clients wait for it also where its last heartbeat is
            old. ``asyncdp serve`` says so of the hosts of its plane.
        drain_s: How long running requests may take at the end.
        sweep_arenas_s: Segments of hosts that have been dead for longer are removed.
        devices: Network devices for UCX; None: all.
        watch_ucx_s: UCX is started anew, with all connections, where its thread was busy for two such spans, or where
            strangers hold more than 128 descriptors: somebody misuses its listener; where that does not help the host
            begins anew. 0: never; in a process that does other work as well it may be misled.
        ucx: Whether to offer UCX at all; without it only the lane and payloads in frames work.
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
        """Refuse what could never store or serve anything."""
        size = self.unit_bytes
        if self.arena_bytes < size:
            raise ValueError(f"arena_bytes: {self.arena_bytes} is smaller than one slot (unit_bytes: {size})")
        if self.max_slot_bytes > self.arena_bytes and self.max_slot_bytes != MAX_SLOT_BYTES:
            raise ValueError(
                f"max_slot_bytes: a slot of {self.max_slot_bytes} does not fit into arena_bytes ({self.arena_bytes})"
            )
        if self.first_port + self.ports > 1 << 16 and self.first_port:
            raise ValueError(f"first_port: {self.first_port} leaves no {self.ports} ports; 65535 is the last")
