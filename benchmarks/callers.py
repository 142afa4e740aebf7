"""Many callers of one client that read rows of 8 KiB, beside what the event loop and bare connections take, in one run.

    python -m benchmarks callers [--rounds 7] [--callers 1,8,64,256] [--calls 1536]

Each caller is a task that reads one row after the other with ``get_samples``; all are tasks of one client on one event
loop. Works are measured in turns; calls a second are medians over rounds, p50 and p99 those of all calls of all rounds.
The garbage collector is as Python sets it.

``wire`` is a client that may not use shared memory. ``bare, lane`` is what no client can do without, by as many tasks:
the directory's function on a connection that all share, a copy of the row, and the TensorDict. ``bare, wire`` has a
request of 64 bytes to another process beside it, on a connection that all share, instead of the copy. ``awaits`` is
two futures a call that the event loop resolves in its next turn, and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import hiredis
import numpy as np
import torch
from tensordict import TensorDict

from asyncdp import stack
from asyncdp.transports.ucxx import UCXXTransport
from asyncdp.transports.ucxx.directory.encoding.msgpack_codec import pack
from benchmarks._turns import line

KIB, MIB = 1 << 10, 1 << 20
SIZE, ROWS, ASK = 8 * KIB, 1024, 64
CONFIG = {
    "enabled": True, "impl": "ucxx", "storage_capacity": 1 << 20,
    "ucxx": {"devices": "lo", "host": {"arena_bytes": 128 * MIB, "ports": 4, "rows_per_slot": 1}},
}  # fmt: skip
NAMESPACE = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]

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
        self.peer = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.callers", "--serve"], stdout=subprocess.PIPE, text=True
        )

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


async def once(work: Call, callers: int, calls: int) -> list[float]:
    """Make ``calls`` calls by so many tasks; return the seconds of each, and last those of all together."""
    taken: list[float] = []
    numbers = itertools.count()

    async def caller() -> None:
        while (at := next(numbers)) < calls:
            began = time.perf_counter()
            await work(at)
            taken.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return [*taken, time.perf_counter() - began]


async def run(counts: list[int], rounds: int, calls: int) -> None:
    """Measure and print all works for each number of callers."""
    callers = Callers()
    try:
        works = await callers.works()
        rates: dict[tuple[str, int], float] = {}
        for count in counts:
            found: dict[str, list[list[float]]] = {name: [] for name in works}
            for number in range(rounds + 1):
                for name, work in works.items():
                    took = await once(work, count, calls)
                    if number:
                        found[name].append(took)
            line(f"{count} callers", "calls/s", "p50", "p99", "p99 / p50", "x bare")
            for name, turns in found.items():
                rates[name, count] = statistics.median((len(turn) - 1) / turn[-1] for turn in turns)
                ordered = sorted(took for turn in turns for took in turn[:-1])
                middle, late = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
                bare = found.get(f"bare, {name}")
                ratio = "" if bare is None else f"{_ratio(turns, bare):.2f}"
                cells = [f"{middle * 1e3:.2f} ms", f"{late * 1e3:.2f} ms", f"{late / middle:.1f}", ratio]
                line(f"  {name}", f"{rates[name, count]:.0f}", *cells)
        for name in ("lane", "wire"):
            best = max(rates[name, count] for count in counts)
            line(f"{name}: calls/s of the best", *[f"{count}: {rates[name, count] / best:.2f}" for count in counts])
    finally:
        await callers.close()


def _ratio(turns: list[list[float]], bare: list[list[float]]) -> float:
    """Return the rate beside that of the bare work: the median over rounds."""
    return statistics.median(b[-1] / a[-1] for a, b in zip(turns, bare, strict=True))


def main() -> int:
    """Measure, in a namespace where UCX listeners reach nobody."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each measurement")
    parser.add_argument("--callers", default="1,8,64,256", help="numbers of callers")
    parser.add_argument("--calls", type=int, default=1536, help="calls of all callers together in a round")
    parser.add_argument("--here", action="store_true", help="not in a namespace: UCX listeners bind everywhere")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve_bytes()
        return 0
    if not args.here:
        command = [*NAMESPACE, sys.executable, "-m", "benchmarks", "callers", "--here", *sys.argv[1:]]
        env = {"UCX_TLS": "tcp,self", "OMP_NUM_THREADS": "1", **os.environ}
        return subprocess.run(command, env=env, check=False).returncode
    torch.set_num_threads(1)
    asyncio.run(run([int(count) for count in args.callers.split(",")], args.rounds, args.calls))
    return 0


if __name__ == "__main__":
    sys.exit(main())
