"""UCX alone between two processes: messages on one connection, driven by the engine, nothing around them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from asyncdp.transports.ucxx.wire.chunks import post_receives, send_all, wait_all
from asyncdp.transports.ucxx.wire.engine import MESSAGE_BYTES, Engine

__all__ = ["raw_peer"]

SIZE, PAYLOAD, ACK = 1, 1000, 2


def _messages(buffer: Any) -> list[Any]:
    return [buffer[begin : begin + MESSAGE_BYTES] for begin in range(0, len(buffer), MESSAGE_BYTES)]


class RawPeer:
    """Sends bytes to another process, which says when it has them."""

    def __init__(self, engine: Engine, endpoint: Any) -> None:
        """Hold the connection."""
        self._engine = engine
        self._endpoint = endpoint
        self._buffers: dict[int, Any] = {}

    async def send(self, nbytes: int) -> None:
        """Send bytes and wait for the answer; 0 ends the peer."""
        engine, endpoint = self._engine, self._endpoint
        buffer = self._buffers.setdefault(nbytes, np.ones(nbytes, np.uint8))
        ack = engine.receive(endpoint, ACK, np.zeros(8, np.uint8))
        await engine.send(endpoint, SIZE, np.frombuffer(np.int64(nbytes).tobytes(), np.uint8)).wait()
        if nbytes:
            await send_all(engine, endpoint, PAYLOAD, _messages(buffer))
        await ack.wait()

    async def receive(self, nbytes: int) -> None:
        """Have the other process send bytes, into memory that is used again."""
        engine, endpoint = self._engine, self._endpoint
        buffer = self._buffers.setdefault(nbytes, np.ones(nbytes, np.uint8))
        operations = post_receives(engine, endpoint, PAYLOAD, [buffer])
        await engine.send(endpoint, SIZE, np.frombuffer(np.int64(-nbytes).tobytes(), np.uint8)).wait()
        await wait_all(operations)


@asynccontextmanager
async def raw_peer(engine: Engine) -> AsyncIterator[RawPeer]:
    """Start the other process and connect."""
    peer = subprocess.Popen(  # noqa: ASYNC220 - it is no work to wait for
        [sys.executable, "-m", "benchmarks._ucxx_raw"], stdout=subprocess.PIPE, text=True
    )
    assert peer.stdout
    port = int(await asyncio.to_thread(peer.stdout.readline))
    endpoint = engine.connect("127.0.0.1", port)
    await engine.send_token(endpoint, np.zeros(16, np.uint8)).wait()
    raw = RawPeer(engine, endpoint)
    try:
        yield raw
        await raw.send(0)
    finally:
        engine.abandon(endpoint)
        peer.terminate()
        peer.wait()
        peer.stdout.close()


async def serve() -> None:
    """Be the other process."""
    engine = Engine(devices="lo")
    arrived: asyncio.Future[Any] = engine.loop.create_future()
    print(engine.listen(arrived.set_result), flush=True)
    endpoint = await arrived
    await engine.receive_token(endpoint, np.zeros(16, np.uint8)).wait()
    buffers: dict[int, Any] = {}
    while True:
        size = np.zeros(8, np.uint8)
        await engine.receive(endpoint, SIZE, size).wait()
        nbytes = int(size.view(np.int64)[0])
        if nbytes:
            buffer = buffers.setdefault(abs(nbytes), np.zeros(abs(nbytes), np.uint8))
        if nbytes < 0:
            await send_all(engine, endpoint, PAYLOAD, _messages(buffer))
            continue
        if nbytes:
            await wait_all(post_receives(engine, endpoint, PAYLOAD, [buffer]))
        await engine.send(endpoint, ACK, np.zeros(8, np.uint8)).wait()
        if not nbytes:
            return


if __name__ == "__main__":
    asyncio.run(serve())
