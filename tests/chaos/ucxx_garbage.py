"""What strangers send: random bytes, half frames, huge lengths, other protocols, wrong secrets."""

from __future__ import annotations

import contextlib
import random
import socket
import struct

from asyncdp.transports.ucxx.wire.messages import Ask, pack_frame

__all__ = ["shower"]


def _bursts(rng: random.Random) -> list[bytes]:
    frame = pack_frame(Ask())
    return [
        rng.randbytes(3000),
        frame[: len(frame) // 2],
        struct.pack("<Q", 1 << 63) + b"\xff" * 64,
        frame[:4] + b"\xff\xff\xff\x7f" + frame[8:],
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        frame,  # a request before the greeting
        b"",
    ]


def shower(address: tuple[str, int], rounds: int, seed: int) -> int:
    """Connect, send each kind of garbage, read what comes, close; returns how many connections were made. Blocks."""
    rng, made = random.Random(seed), 0
    for _ in range(rounds):
        for burst in _bursts(rng):
            with contextlib.suppress(OSError), socket.create_connection(address, timeout=2.0) as stranger:
                made += 1
                stranger.sendall(burst)
                stranger.settimeout(0.01)
                stranger.recv(4096)
    return made
