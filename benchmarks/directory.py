"""The directory of UCXX: what its verbs take, flat beside a million rows or not, at many clients, and a model of that.

``server`` is how long the thread of the server was busy with the function (its slow log): everybody else waits that
long. The model (``_scale.py``) is fitted to partitions of up to 16,000 rows, and compared with larger ones. At last raw
connections send locates without a pause, to see whether throughput and latency of many clients are those of the model.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hiredis

from asyncdp.calls import RegisterPartition
from asyncdp.calls.slots import HostRef, Publish, SlotRef
from asyncdp.calls.snapshots import ClaimState, RestoreClaims
from asyncdp.rows.block import FieldSpec
from asyncdp.transports.ucxx.directory import Directory, DirectorySettings, EmbeddedServer, HostInfo, OperationId
from benchmarks import _scale

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from benchmarks._results import Result, Table
    from benchmarks._scenario import Bench

HOST = HostRef("host", 1, (1, 2, 3, 4))
FIELDS = ("input_ids", "logprobs", "reward", "mask")
SPECS = dict.fromkeys(FIELDS, FieldSpec("object"))
GROUP = 8
#: Rows of partitions that the model is fitted to.
SMALL = (1_000, 4_000, _scale.FITTED)
#: Rows of a call.
CALLS = (8, 64, 256, 1024)
#: Rows of the partition of which all verbs are measured.
SIZE = 10_240


class Plane:
    """A server, and a client of its directory."""

    def __init__(self, directory: Directory, group: int = GROUP) -> None:
        """Begin without rows; 0: partitions have no whole groups."""
        self.directory = directory
        self.group = group or None
        self.link: Any = directory._link  # noqa: SLF001 - the server's own figures are not part of the API
        self._numbers = itertools.count()
        self._next: dict[str, int] = {}
        #: By partition, what was claimed and not removed, the oldest claim first.
        self._claimed: dict[str, list[list[str]]] = {}

    def operation(self) -> OperationId:
        """Name a mutation."""
        return OperationId(f"op{next(self._numbers)}", 60.0)

    async def publish(self, partition: str, rows: int) -> list[str]:
        """Publish new rows of one slot, with four fields and tags."""
        first = self._next.get(partition, 0)
        self._next[partition] = first + rows
        ids = [f"prompt{at // GROUP}_g{at % GROUP}" for at in range(first, first + rows)]
        tags = tuple({"weight_version": 3, "input_lengths": 100 + at, "reward": 0.25} for at in range(rows))
        ref = SlotRef(HOST, first, 1, FIELDS, range(rows), range(rows))
        nbytes = dict.fromkeys(FIELDS, (1024,) * rows)
        call = Publish(tuple(ids), partition, (ref,), tags, SPECS, nbytes)
        await self.directory.publish(self.operation(), call, "bench")
        return ids

    async def claim(self, partition: str, rows: int) -> None:
        """Claim the oldest rows."""
        told = await self.directory.claim(self.operation(), partition, "train", FIELDS, rows, rows, "bench")
        assert len(told.meta.sample_ids) == rows, f"{len(told.meta.sample_ids)} of {rows} rows were claimed"
        self._claimed.setdefault(partition, []).append(list(told.meta.sample_ids))

    async def locate(self, partition: str, rows: int) -> None:
        """Look up rows that are claimed."""
        (ids,) = [ids for ids in self._claimed[partition] if len(ids) == rows]
        await self.directory.locate(partition, ids, FIELDS)

    async def clear(self, partition: str, rows: int) -> None:
        """Remove the rows of a claim, so that the partition is as large as before."""
        (ids,) = [ids for ids in self._claimed[partition] if len(ids) == rows]
        self._claimed[partition].remove(ids)
        await self.directory.clear(self.operation(), partition, ids)

    async def list(self, partition: str, rows: int) -> None:
        """List all groups."""
        groups = await self.directory.list_metadata(partition)
        assert len(groups) == rows // GROUP, len(groups)

    async def depth(self, partition: str, rows: int) -> None:
        """Count the groups that are ready; none is claimed."""
        assert await self.directory.depth(partition) == rows // GROUP

    async def fill(self, partition: str, rows: int) -> None:
        """Make a partition of so many rows, with the index of its task."""
        await self.directory.register(RegisterPartition(partition, FIELDS, 1 << 21, ("train",), self.group))
        await self.directory.claim(self.operation(), partition, "train", FIELDS, 256, 256, "bench")
        for at in range(0, rows, 2048):
            await self.publish(partition, min(2048, rows - at))

    def timed(self, call: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[dict[str, float]]]:
        """Return a work that tells the seconds of a call as the caller and as the server see it."""

        async def work() -> dict[str, float]:
            await self.link.command("SLOWLOG", "RESET")
            began = time.perf_counter()
            told = await call()
            took = told if isinstance(told, float) else time.perf_counter() - began
            log = await self.link.command("SLOWLOG", "GET", -1)
            busy = [entry[2] for entry in log if entry[3][0] != b"SLOWLOG"]
            return {"": took, "server": sum(busy) / 1e6}

        return work


async def measure(
    bench: Bench,
    *,
    sizes: tuple[int, ...] = (100_000, 1_000_000),
    most_listed: int = 100_000,
    clients: tuple[int, ...] = (64, 1000),
    group: int = GROUP,
    parts: tuple[str, ...] = ("verbs", "sizes", "clients"),
) -> None:
    """Measure all verbs, then beside partitions of ``sizes``, listed up to ``most_listed`` rows, and at clients."""
    server = EmbeddedServer()
    await server.start()
    bench.stack.push_async_callback(server.stop)
    directory = Directory(server.url, settings=DirectorySettings(host_timeout_s=3600, host_forget_s=3600))
    bench.stack.push_async_callback(directory.close)
    plane = Plane(directory, group)
    await directory.beat(HostInfo(HOST.id, HOST.epoch, ports=HOST.ports))
    await plane.link.command("CONFIG", "SET", "slowlog-log-slower-than", "0", "slowlog-max-len", "1000")
    if "verbs" in parts:
        await all_verbs(bench, plane)
    if "sizes" in parts:
        await by_size(bench, plane, (*SMALL, *([] if bench.quick else sizes)), most_listed)
    if "clients" in parts:
        await saturate(bench, plane, clients)


async def all_verbs(bench: Bench, plane: Plane) -> None:
    """Measure a life of a partition of 10,240 rows in each round, beside a request that does nothing."""
    directory, some = plane.directory, [f"prompt{at // GROUP}_g{at % GROUP}" for at in range(256)]
    state: dict[str, Any] = {"number": 0}

    def name() -> str:
        return f"life{state['number']}"

    async def begin() -> float:
        state["number"] += 1
        await directory.register(RegisterPartition(name(), FIELDS, SIZE, ("train", "score"), plane.group))
        await directory.claim(plane.operation(), name(), "train", FIELDS, 256, 256, "bench")
        began = time.perf_counter()
        await plane.publish(name(), SIZE)
        return time.perf_counter() - began

    async def score(rows: int) -> None:
        await directory.claim(plane.operation(), name(), "score", FIELDS, rows, rows, "bench")

    async def restore() -> float:
        rows = tuple((row.sample_id, row.life) for row in (await directory.snapshot(name())).rows)
        claims = (ClaimState("bench", "log", FIELDS, rows, 1.0, None),)
        began = time.perf_counter()
        await directory.restore_claims(plane.operation(), RestoreClaims(name(), ("log",), claims))
        return time.perf_counter() - began

    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "publish 10,240 rows at once": begin,
        "claim 256": lambda: plane.claim(name(), 256),
        "claim, nothing ready": lambda: directory.claim(
            plane.operation(), name(), "train", FIELDS, 2 * SIZE, 2 * SIZE, "bench"
        ),
        "place 256": lambda: directory.place(name(), some, FIELDS),
        "locate 256": lambda: directory.locate(name(), some, FIELDS),
        "list_metadata": lambda: directory.list_metadata(name()),
        "depth": lambda: directory.depth(name()),
        "list_claims": lambda: directory.list_claims(name(), "train"),
        "snapshot": lambda: directory.snapshot(name()),
        "restore_claims of all": restore,
        "first claim of a task": lambda: score(256),
        "claim 9,984": lambda: score(9984),
        "clear 256": lambda: plane.clear(name(), 256),
        "drop": lambda: directory.drop(plane.operation(), name()),
        "no-op": lambda: directory.resolve("x", name()),
    }
    works = {key: plane.timed(call) for key, call in calls.items()}
    await bench.measure(f"{SIZE:,} rows", works, beside=["no-op"], rounds=9, in_order=True)


async def by_size(bench: Bench, plane: Plane, sizes: tuple[int, ...], most_listed: int) -> None:
    """Measure calls beside partitions of all sizes in each round: how flat are they, and how far is the model off?"""
    bytes_a_row = {}
    for size in sizes:
        before = await used_bytes(plane)
        await plane.fill(str(size), size)
        bytes_a_row[size] = (await used_bytes(plane) - before) / size
    verbs = (plane.publish, plane.claim, plane.locate, plane.clear)
    works = {
        f"{verb.__name__} {rows} beside {size}": plane.timed(partial(verb, str(size), rows))
        for size in sizes
        for verb in verbs
        for rows in CALLS
    }
    read = await bench.measure("by size", works, beside=["valkey round trip"], rounds=25, in_order=True)
    for size in sizes:
        info = await plane.directory.describe(str(size))
        bench.check(info.size == size, f"the partition of {size} rows has {info.size}")
        if size > min(sizes):
            for verb in ("publish", "claim"):
                must = {"at_most": 1.2, "must": "7"} if size > _scale.FITTED else {}
                read.ratio(f"{verb} 256 beside {size}", f"{verb} 256 beside {min(sizes)}", **must)
    listed = {
        f"{verb.__name__} {size} beside {size}": plane.timed(partial(verb, str(size), size))
        for size in sizes
        for verb in (plane.list, plane.depth)
        if size <= most_listed
    }
    whole = await bench.measure("all of a partition", listed, beside=["valkey round trip"], rounds=7)
    for size, each in list(bytes_a_row.items())[2:]:  # of few rows it is lost among what else comes and goes
        bench.figure("all of a partition", f"memory of the server, {size} rows", [each], unit="bytes a row")
    beside_model(bench, read.table)
    beside_model(bench, whole.table)


def beside_model(bench: Bench, table: Table) -> None:
    """Note how far the model is off at large partitions: of the server, and where all rows are listed of the caller."""
    for name, seconds in table.seconds.items():
        point = _scale.parse(name)
        if point and point.size > _scale.FITTED and name.endswith(", server") == (point.rows < point.size):
            server = point.rows < point.size
            told = _scale.costs_of(bench.result.tables, _scale.FITTED, server=server)[point.verb]
            values = [took / told.seconds(point.rows, point.size) for took in seconds]
            bench.figure("beside the model", f"{name}: measured / model", values, at_least=0.8, at_most=1.25)


def plots(result: Result, folder: Path) -> list[Path]:
    """Draw the server's time by size, measured and as the model says, and what clusters would do for many clients."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "asyncdp"
    costs = _scale.costs_of(result.tables, _scale.FITTED)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    sizes = [1000 * 2**at for at in range(11)]
    for at, verb in enumerate(("publish", "claim", "locate", "clear")):
        colour = f"C{at}"
        left.plot(sizes, [costs[verb].seconds(256, size) * 1e3 for size in sizes], color=colour, label=f"{verb} of 256")
        for table in result.tables:
            for name, seconds in table.seconds.items():
                point = _scale.parse(name)
                if point and name.endswith(", server") and (point.verb, point.rows) == (verb, 256):
                    left.plot([point.size], [statistics.median(seconds) * 1e3], "o", color=colour)
    left.set(xscale="log", ylim=(0, None), xlabel="rows of the partition", ylabel="ms of the server's thread")
    left.set_title("model (lines) and measured (points)", fontsize=10)
    left.legend(fontsize=8)
    step = _scale.Step.of(result.tables)
    counts = [2**at for at in range(13)]
    for nodes in (1, 4, 16):
        demands = [step.seconds * share for share in _scale.shares_of(_scale.partitions_for(nodes), nodes)]
        rates = [256 * _scale.closed(count, 1.0, demands).rate for count in counts]
        right.plot(counts, rates, label=f"{nodes} primaries" if nodes > 1 else "one Valkey")
    right.set(xscale="log", yscale="log", xlabel="clients, a pause of 1 s between steps", ylabel="rows a second")
    right.set_title("model: steps of 256 rows", fontsize=10)
    right.legend(fontsize=8)
    file = folder / "directory.svg"
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
    return [file]


async def used_bytes(plane: Plane) -> int:
    """Return the memory of the server."""
    lines = (await plane.link.command("INFO", "memory")).decode().splitlines()
    return int(next(line for line in lines if line.startswith("used_memory:")).partition(":")[2])


class Flood:
    """Sends one command again and again over many connections, each as soon as its answer is there.

    Args:
        settings: Socket and password, as of the link's connections.
        command: What is sent.
    """

    def __init__(self, settings: dict[str, Any], command: bytes) -> None:
        """Connect nothing yet."""
        self._path, self._password = settings["path"], settings["password"]
        self._command = command

    async def run(self, clients: int) -> dict[str, float]:
        """Return seconds of all by calls, and the mean seconds that a call waited."""
        opened = []
        for _ in range(clients):
            opened.append(await asyncio.open_unix_connection(self._path))
            await self._ask(*opened[-1], f"AUTH {self._password}\r\n".encode())
        calls, took = max(4, 1000 // clients), []

        async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for number in range(calls):
                began = time.perf_counter()
                reply = await self._ask(reader, writer, self._command)
                assert reply[0] == 0, reply
                if number:  # the first ones find no queue
                    took.append(time.perf_counter() - began)

        began = time.perf_counter()
        await asyncio.gather(*(client(*one) for one in opened))
        passed = time.perf_counter() - began
        for _, writer in opened:
            writer.close()
        return {"a call": passed / (clients * calls), "latency": statistics.mean(took)}

    @staticmethod
    async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, command: bytes) -> Any:
        parser = hiredis.Reader()
        writer.write(command)
        while (reply := parser.gets()) is False:
            parser.feed(await reader.read(1 << 16))
        return reply


async def saturate(bench: Bench, plane: Plane, clients: tuple[int, ...]) -> None:
    """Have locates of 256 rows sent without a pause, and compare many clients with what eight of them tell."""
    await plane.directory.register(RegisterPartition("flood", FIELDS, 256, ("train",), plane.group))
    ids, maker, send = await plane.publish("flood", 256), plane.link._maker, plane.link.pipeline  # noqa: SLF001
    packed: list[bytes] = []

    async def noted(commands: Any) -> Any:
        if str(commands[0][1]).startswith("locate_"):
            packed[:] = maker.make_connection().pack_commands(commands)
        return await send(commands)

    plane.link.pipeline = noted
    await plane.directory.locate("flood", ids, FIELDS)
    plane.link.pipeline = send
    await plane.link.command("CONFIG", "SET", "slowlog-log-slower-than", "-1")
    flood = Flood(maker.connection_kwargs, b"".join(packed))
    works = {f"{count} clients": partial(flood.run, count) for count in (8, *clients)}
    read = await bench.measure("locates of 256 rows without a pause", works, rounds=9)
    for count in clients:
        name = f"{count} clients"
        model = {"a call": 1, "latency": count}  # a full server: throughput stays, each waits for all others
        for what, times in model.items():
            of = lambda s, key=f"{name}, {what}", times=times: s[key] / (times * s["8 clients, a call"])  # noqa: E731
            read.figure(f"{name}, {what}: measured / model", of, at_least=0.8, at_most=1.25)
