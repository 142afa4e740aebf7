"""What the directory of the ucxx backend costs: publish 256 rows, claim 256 of 10k, list 10k, beside a no-op.

Run ``python -m benchmarks.directory``; with ``--sizes 1000 100000 1000000`` instead what publish, claim, depth and a
listing take in partitions of so many rows, as ratios to the first, the server's memory per row, and what a row of puts
of several sizes costs. Medians over rounds; ``server`` is how long the server's one thread was busy per call (its slow
log), so everybody else waits that long. Needs the extras ``ucxx`` and ``embedded``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio

from asyncdp.calls import RegisterPartition
from asyncdp.calls.slots import HostRef, Publish, SlotRef
from asyncdp.calls.snapshots import ClaimState, RestoreClaims
from asyncdp.rows.block import FieldSpec
from asyncdp.transports.ucxx.directory import Directory, DirectorySettings, EmbeddedServer, HostInfo, OperationId
from asyncdp.transports.ucxx.directory.server.link import lines_of

HOST = HostRef("host", 1, (1, 2, 3, 4))
FIELDS = ("input_ids", "logprobs", "reward", "mask")
SPECS = dict.fromkeys(FIELDS, FieldSpec("object"))
#: Rows of the puts of which a row's cost is told.
PUTS = (8, 64, 256, 1024)


class Bench:
    """One directory, and what its calls took."""

    def __init__(self, directory: Directory) -> None:
        """Begin with no call made."""
        self.directory = directory
        self.count = 0

    def mutation(self) -> OperationId:
        """Name a mutation."""
        self.count += 1
        return OperationId(f"op{self.count}", 60.0)

    async def log_everything(self) -> None:
        """Let the server note how long each command takes."""
        told = ("CONFIG", "SET", "slowlog-log-slower-than", "0", "slowlog-max-len", "100000")
        await self.directory._link.command(*told)  # noqa: SLF001 - as in measure

    async def used_bytes(self) -> int:
        """Ask how much memory the server uses."""
        info = lines_of(await self.directory._link.command("INFO", "memory"))  # noqa: SLF001 - as in measure
        return int(info["used_memory"])

    async def measure(self, name: str, times: int, call: Callable[[int], Awaitable[Any]]) -> None:
        """Print the median of a call, as the client and as the server see it."""
        link = self.directory._link  # noqa: SLF001 - the server's own figures are not part of the API
        await link.command("SLOWLOG", "RESET")
        took = []
        for i in range(times):
            began = time.perf_counter()
            await call(i)
            took.append(time.perf_counter() - began)
        log = await link.command("SLOWLOG", "GET", -1)
        busy = [entry[2] for entry in log if entry[3][0] == b"FCALL"]
        calls = len(busy) / times
        worst = max(busy, default=0) / 1e3
        mean = statistics.median(busy) / 1e3 if busy else 0.0
        wall = statistics.median(took) * 1e3
        print(f"{name:44} {wall:9.2f} {mean:9.2f} {worst:9.2f} {calls:7.1f}")

    async def publish(self, partition: str, first: int, rows: int, group: int = 8) -> None:
        """Publish rows of one slot with four fields and tags."""
        ids = tuple(f"prompt{(first + i) // group}_g{(first + i) % group}" for i in range(rows))
        tags = tuple({"weight_version": 3, "input_lengths": 100 + i, "reward": 0.25} for i in range(rows))
        ref = SlotRef(HOST, first, 1, FIELDS, range(rows), range(rows))
        nbytes = dict.fromkeys(FIELDS, (1024,) * rows)
        await self.directory.publish(self.mutation(), Publish(ids, partition, (ref,), tags, SPECS, nbytes), "bench")


async def run(rounds: int, group: int | None) -> None:
    """Measure everything once, with whole groups or without."""
    server = EmbeddedServer()
    await server.start()
    directory = Directory(server.url, settings=DirectorySettings())
    bench = Bench(directory)
    size = 10_240
    try:
        await directory.beat(HostInfo(HOST.id, HOST.epoch, ports=HOST.ports))
        await directory.register(RegisterPartition("p", FIELDS, size, ("train", "score"), group))
        await directory.register(RegisterPartition("one", FIELDS, size, ("train",), group))
        await bench.log_everything()
        print(f"{'grpo_group_size ' + str(group):44} {'wall ms':>9} {'server ms':>9} {'worst ms':>9} {'calls':>7}")
        await bench.measure("no-op (resolve)", 500, lambda _: directory.resolve("x", "p"))
        # a first look, so that publishing feeds an index, as it does in a running plane
        await directory.claim(bench.mutation(), "p", "train", FIELDS, 256, 256, "bench")
        await bench.measure("publish 256 rows", size // 256, lambda i: bench.publish("p", 256 * i, 256))
        some = [f"prompt{i // 8}_g{i % 8}" for i in range(256)]
        await bench.measure("place 256 ids", rounds, lambda _: directory.place("p", some, FIELDS))
        await bench.measure("locate 256 ids, 4 fields", rounds, lambda _: directory.locate("p", some, FIELDS))
        await bench.measure("list_metadata, 10k rows", 5, lambda _: directory.list_metadata("p"))
        await bench.measure("depth, 10k rows", 5, lambda _: directory.depth("p"))
        claim = lambda _: directory.claim(bench.mutation(), "p", "train", FIELDS, 256, 256, "bench")  # noqa: E731
        await bench.measure("claim 256 of 10k", 30, claim)
        await bench.measure("claim, nothing ready", rounds, lambda _: directory.claim(
            bench.mutation(), "p", "train", FIELDS, size, size, "bench"))  # fmt: skip
        await bench.measure("list_claims, 7.7k claimed rows", 5, lambda _: directory.list_claims("p", "train"))
        await bench.measure("snapshot, 10k rows, 7.7k claimed", 5, lambda _: directory.snapshot("p"))
        rows = tuple((row.sample_id, row.life) for row in (await directory.snapshot("p")).rows)
        made = (ClaimState("bench", "log", FIELDS, rows, 1.0, None),)
        again = RestoreClaims("p", ("log",), made)
        await bench.measure("restore_claims, 10k rows", 1, lambda _: directory.restore_claims(bench.mutation(), again))
        await bench.measure("first claim of a task, 10k rows", 1, lambda _: directory.claim(
            bench.mutation(), "p", "score", FIELDS, 256, 256, "bench"))  # fmt: skip
        await bench.measure("claim 9984 of 10k", 1, lambda _: directory.claim(
            bench.mutation(), "p", "score", FIELDS, 9984, 9984, "bench"))  # fmt: skip
        pops = [[f"prompt{i // 8}_g{i % 8}" for i in range(at, at + 256)] for at in range(0, size, 256)]
        await bench.measure("pop 256 claimed rows", 20, lambda i: directory.clear(bench.mutation(), "p", pops[i]))
        await bench.measure("publish 10k rows at once", 1, lambda _: bench.publish("one", 0, size))
        await bench.measure("drop 10k rows", 1, lambda _: directory.drop(bench.mutation(), "one"))
    finally:
        await directory.close()
        await server.stop()


class Rounds:
    """What calls took, by name and number, measured in turns so that other work on the machine hits all alike."""

    def __init__(self) -> None:
        """Begin with nothing measured."""
        self.took: dict[tuple[str, int], list[float]] = {}

    async def time(self, name: str, number: int, call: Awaitable[Any]) -> None:
        """Await a call, and note how long it took."""
        began = time.perf_counter()
        await call
        self.took.setdefault((name, number), []).append(time.perf_counter() - began)

    def table(self, head: str, numbers: Sequence[int], *, per: bool = False) -> None:
        """Print medians and their ratios to the first; ``per``: of each one's share, as of a row of a put."""
        print(f"{head:24}" + "".join(f"{number:>20}" for number in numbers))
        for name in dict.fromkeys(name for name, _ in self.took):
            line, first = f"{name:24}", 0.0
            for number in numbers:
                took = self.took.get((name, number))
                if took is None:
                    continue
                median = statistics.median(took) / (number if per else 1)
                first = first or median
                unit = f"{median * 1e6:>11.2f} us" if per else f"{median * 1e3:>11.2f} ms"
                line += f"{unit} {median / first:5.2f}"
            print(line)


#: Listings of larger partitions would take gigabytes of this process.
LISTED = 100_000


async def sizes(counts: Sequence[int], rounds: int, group: int | None) -> None:
    """Print what calls take beside so many rows, and as a ratio to the smallest number, and what a row costs."""
    server = EmbeddedServer()
    await server.start()
    directory = Directory(server.url, settings=DirectorySettings())
    bench, turns, puts = Bench(directory), Rounds(), Rounds()
    try:
        await directory.beat(HostInfo(HOST.id, HOST.epoch, ports=HOST.ports))
        for count in counts:
            await directory.register(RegisterPartition(str(count), FIELDS, max(counts), ("train",), group))
            await directory.claim(bench.mutation(), str(count), "train", FIELDS, 256, 256, "bench")
            before = await bench.used_bytes()
            for first in range(0, count, 2048):
                await bench.publish(str(count), first, min(2048, count - first) // 8 * 8)
            per_row = (await bench.used_bytes() - before) / count
            print(f"{count} rows are there, {per_row:.0f} bytes of the server's memory each", flush=True)
        for number in range(rounds):
            for count in counts:
                name = str(count)
                await turns.time("publish 256 rows", count, bench.publish(name, 8 * count + 256 * number, 256))
                claim = directory.claim(bench.mutation(), name, "train", FIELDS, 256, 256, "bench")
                await turns.time("claim 256 rows", count, claim)
                await turns.time("depth", count, directory.depth(name))
            for count in counts if number < 2 else ():
                if count <= LISTED:
                    await turns.time("list_metadata", count, directory.list_metadata(str(count)))
            for rows in PUTS:
                await puts.time("publish", rows, bench.publish(str(counts[0]), (rows << 32) + rows * number, rows))
        turns.table("beside so many rows", counts)
        puts.table("each row of a put of", PUTS, per=True)
    finally:
        await directory.close()
        await server.stop()


def main() -> None:
    """Measure without and with whole groups, or by size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--sizes", type=int, nargs="+", help="rows of partitions to compare")
    parser.add_argument("--group", type=int, default=8, help="with --sizes: grpo_group_size; 0: no whole groups")
    args = parser.parse_args()
    if args.sizes:
        anyio.run(sizes, args.sizes, args.rounds, args.group or None)
        return
    for group in (None, 8):
        anyio.run(run, args.rounds, group)


if __name__ == "__main__":
    main()
