"""Many callers of one client that read rows of 8 KiB, beside what the event loop and bare connections take.

Each caller is a task that reads one row after the other with ``get_samples``; all are tasks of one client on one event
loop. ``a call`` is the time of all together by their number, ``p50`` and ``p99`` what one waits.

``wire`` is a client that may not use shared memory. ``bare, lane`` is what no client can do without, by as many tasks:
the directory's function on a connection that all share, a copy of the row, and the TensorDict. ``bare, wire`` has a
request of 64 bytes to another process beside it, on a connection that all share, instead of the copy. ``awaits`` is
two futures a call that the event loop resolves in its next turn, and nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import hiredis
import numpy as np
import torch
from tensordict import TensorDict

from asyncdp import stack
from asyncdp.transports.ucxx import UCXXTransport
from asyncdp.transports.ucxx.directory.encoding.msgpack_codec import pack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks._scenario import Bench, Measured

KIB, MIB = 1 << 10, 1 << 20
SIZE, ROWS, ASK = 8 * KIB, 1024, 64
CONFIG = {
    "enabled": True, "impl": "ucxx", "storage_capacity": 1 << 20,
    "ucxx": {"devices": "lo", "host": {"arena_bytes": 128 * MIB, "ports": 4, "rows_per_slot": 1}},
}  # fmt: skip
NAMESPACE = True

#: Makes one call; ``at`` counts the calls.
Call = Callable[[int], Awaitable[object]]


class Pipe(asyncio.Protocol):
    """A connection on which requests are written as they come, and answered in that order."""

    def __init__(self, answer_bytes: int) -> None:
        """Expect answers of so many bytes; 0: those of a Valkey server."""
        self._bytes, self._came = answer_bytes, 0
        self._reader = hiredis.Reader()
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        """Keep the transport."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer the oldest requests."""
        if self._bytes:
            self._came += len(data)
            while self._came >= self._bytes:
                self._came -= self._bytes
                self._waiting.popleft().set_result(None)
            return
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not False:
            assert not isinstance(reply, Exception), reply
            self._waiting.popleft().set_result(reply)

    def ask(self, request: bytes) -> asyncio.Future[Any]:
        """Send a request."""
        self.transport.write(request)
        made = asyncio.get_running_loop().create_future()
        self._waiting.append(made)
        return made


def serve_bytes() -> None:
    """Be the other process of ``bare, wire``: answer 64 bytes with 8 KiB."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        conn, _ = server.accept()
    came, answer = 0, bytes(SIZE)
    while data := conn.recv(1 << 16):
        came += len(data)
        conn.sendall(answer * (came // ASK))
        came %= ASK


class Callers:
    """A plane, its clients, and what they are compared with."""

    def __init__(self) -> None:
        """Start the plane."""
        self.owner = UCXXTransport(CONFIG)
        self.ids = [f"s{at}" for at in range(ROWS)]
        self.peer = subprocess.Popen([sys.executable, "-m", "benchmarks.callers"], stdout=subprocess.PIPE, text=True)

    def client(self, lane: str) -> Any:
        """Return a client of the plane."""
        config = self.owner.attach_config()
        return stack(UCXXTransport({**config, "ucxx": {**config["ucxx"], "lane": lane}}, bootstrap=False))

    async def works(self) -> dict[str, Call]:
        """Put the rows; return the works by name."""
        lane, wire = self.client("auto"), self.client("off")
        self.clients = (lane, wire)
        await lane.register_partition("p", ["x"], ROWS, ["t"])
        await lane.put_samples(self.ids, "p", {"x": torch.randn(ROWS, SIZE // 4)})
        locate, rows = await self._directory()
        assert self.peer.stdout
        port = int(await asyncio.to_thread(self.peer.stdout.readline))
        _, peer = await asyncio.get_running_loop().create_connection(lambda: Pipe(SIZE), "127.0.0.1", port)
        loop, data = asyncio.get_running_loop(), np.ones(ROWS * SIZE, np.uint8)

        def row_of(at: int) -> TensorDict:
            out = np.empty(SIZE, np.uint8)
            out[:] = data[at * SIZE : (at + 1) * SIZE]
            return TensorDict({"x": torch.from_numpy(out).view(torch.float32).view(1, -1)}, [1])

        async def bare_lane(at: int) -> object:
            await locate.ask(rows[at % ROWS])
            return row_of(at % ROWS)

        async def bare_wire(at: int) -> object:
            await locate.ask(rows[at % ROWS])
            await peer.ask(bytes(ASK))
            return row_of(at % ROWS)

        async def awaits(_: int) -> None:
            for _ in range(2):
                future = loop.create_future()
                loop.call_soon(future.set_result, None)
                await future

        def reads(client: Any) -> Call:
            return lambda at: client.get_samples([self.ids[at % ROWS]], "p", ["x"])

        return {"lane": reads(lane), "wire": reads(wire), "bare, lane": bare_lane, "bare, wire": bare_wire,
                "awaits": awaits}  # fmt: skip

    async def _directory(self) -> tuple[Pipe, list[bytes]]:
        """Return a connection to the directory, and the request that locates each row."""
        directory: Any = self.owner._directory  # noqa: SLF001 - its requests are what is repeated
        await directory.locate("p", self.ids[:1], ("x",), None)
        version, schema = directory._link._version, directory._schemas["p"].version  # noqa: SLF001
        url = urlsplit(self.owner.attach_config()["controller_address"])
        loop = asyncio.get_running_loop()
        _, pipe = await loop.create_unix_connection(lambda: Pipe(0), url.path)
        await pipe.ask(hiredis.pack_command(("AUTH", url.username or "default", url.password or "")))
        key = directory._key("p")  # noqa: SLF001
        made = [("FCALL", f"locate_{version}", 1, key, "", 0, schema, pack(((name,),))) for name in self.ids]
        return pipe, [hiredis.pack_command(one) for one in made]

    async def close(self) -> None:
        """Stop everything."""
        for client in self.clients:
            await client.close()
        await self.owner.close()
        self.peer.kill()
        self.peer.wait()


def once(work: Call, callers: int, calls: int) -> Callable[[], Awaitable[dict[str, float]]]:
    """Return a work that makes ``calls`` calls by so many tasks."""

    async def run() -> dict[str, float]:
        taken: list[float] = []
        numbers = itertools.count()

        async def caller() -> None:
            while (at := next(numbers)) < calls:
                began = time.perf_counter()
                await work(at)
                taken.append(time.perf_counter() - began)

        began = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers)))
        each, taken = (time.perf_counter() - began) / calls, sorted(taken)
        return {"a call": each, "p50": taken[len(taken) // 2], "p99": taken[len(taken) * 99 // 100]}

    return run


async def measure(bench: Bench, *, callers: tuple[int, ...] = (1, 8, 64, 256), calls: int = 1536) -> None:
    """Measure all works for each number of callers, in the same rounds."""
    plane = Callers()
    bench.stack.push_async_callback(plane.close)
    made = await plane.works()
    works = {f"{name}, {count}": once(work, count, calls) for count in callers for name, work in made.items()}
    read = await bench.measure("reads of 8 KiB", works, rounds=9)
    for name in ("lane", "wire"):
        for count in callers:
            read.ratio(f"{name}, {count}, a call", f"bare, {name}, {count}, a call")
        _aims(read, name, callers)


def _aims(read: Measured, name: str, callers: tuple[int, ...]) -> None:
    most = f"{name}, {max(callers)}"

    def beside_best(s: Mapping[str, float]) -> float:
        return min(s[f"{name}, {count}, a call"] for count in callers) / s[f"{most}, a call"]

    read.figure(f"rate of {most} callers / the best", beside_best, at_least=0.9, must="4")
    read.ratio(f"{most}, p99", f"{most}, p50", at_most=5, must="4")
    if name == "lane" and 64 in callers:
        read.figure("lane, 64 callers", lambda s: 1 / s["lane, 64, a call"], at_least=1e4, unit="a second", must="4")


if __name__ == "__main__":
    serve_bytes()
