"""What a put costs on UCXX, on the lane and over the wire, beside the work that it cannot do without, in one run.

    python -m benchmarks put [--rounds 30] [--no-ray] [--here]

Works are measured in turns; all numbers are medians over rounds, ratios round by round. The same bytes: ``ring``, a
bare write into a ring in shared memory, one record of all rows; ``publish``, one call to the directory that publishes
as many rows; ``memcpy`` into memory that is used again, and into fresh pages; ``raw ucx``, messages of UCX alone;
``ray``, a ``ray.put`` of one array. Below the times stand ratios, and these are the aims for the lane: a put by ring
and publish (256 rows <= 2, one row <= 3), memcpy by it (>= 0.5 from 256 MiB on), it by Ray's put (<= 1.5). UCX
listeners bind to every address, so all of it runs in a network namespace where one can be had.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import statistics
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from asyncdp import stack
from asyncdp.calls.slots import HostRef, Publish, SlotRef
from asyncdp.rows.block import Block
from asyncdp.transports.ucxx import UCXXTransport
from asyncdp.transports.ucxx.directory import OperationId
from asyncdp.transports.ucxx.wire.engine import Engine
from benchmarks._ucxx_raw import RawPeer, raw_peer
from benchmarks._ucxx_table import Rounds, line

KIB, MIB = 1 << 10, 1 << 20
ARENA = 2048 * MIB
CONFIG = {
    "enabled": True, "impl": "ucxx", "storage_capacity": 1 << 20, "call_timeout_s": 60.0,
    "ucxx": {"devices": "lo", "host": {"arena_bytes": ARENA, "ports": 2}},
}  # fmt: skip
NAMESPACE = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


class Ring:
    """A ring of records in shared memory: a length and the bytes, one after the other.

    Args:
        nbytes: Its size.
    """

    def __init__(self, nbytes: int) -> None:
        """Map it, and touch its pages."""
        fd = os.memfd_create("ring")
        try:
            os.ftruncate(fd, nbytes)
            self._map = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        self._data = np.frombuffer(self._map, np.uint8)
        self._data[:] = 1
        self._at = 0

    def write(self, parts: list[np.ndarray[Any, Any]]) -> None:
        """Write one record."""
        nbytes = sum(len(part) for part in parts)
        if self._at + 8 + nbytes > len(self._data):
            self._at = 0
        at = self._at + 8
        for part in parts:
            self._data[at : at + len(part)] = part
            at += len(part)
        struct.pack_into("<Q", self._map, self._at, nbytes)
        self._at = -(-at // 8) * 8


def dense(n: int, size: int) -> TensorDict:
    """Rows of one field, which lie in one tensor."""
    return TensorDict({"x": torch.ones(n, size // 4)}, [n])


def grpo(n: int) -> TensorDict:
    """A batch of GRPO: prompt and response of 64 to 2,048 tokens, and what belongs to each token or sample."""
    lengths = torch.randint(64, 2049, (n,), generator=torch.Generator().manual_seed(0)).tolist()

    def ragged(dtype: torch.dtype) -> torch.Tensor:
        rows = [torch.ones(length, dtype=dtype) for length in lengths]
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    fields = {"input_ids": ragged(torch.int64), "token_mask": ragged(torch.bool), "logprobs": ragged(torch.float32)}
    return TensorDict({**fields, "reward": torch.ones(n)}, [n])


LAYOUTS: dict[str, Callable[[], TensorDict]] = {
    "1 x 64 KiB": lambda: dense(1, 64 * KIB),
    "256 x 64 KiB": lambda: dense(256, 64 * KIB),
    "256 x 1 MiB": lambda: dense(256, MIB),
    "32 x 16 MiB": lambda: dense(32, 16 * MIB),
    "GRPO, 1,024 rows": lambda: grpo(1024),
}


def bytes_of(fields: TensorDict) -> list[np.ndarray[Any, Any]]:
    """Return the bytes of each field, as they lie in memory."""
    parts = []
    for value in fields.values():
        flat = value.values() if value.is_nested else value
        parts.append(flat.reshape(-1).view(torch.uint8).numpy())
    return parts


class Layout:
    """The works of one layout.

    Args:
        fields: The rows.
        transport: The transport whose directory is measured.
        clients: Clients that put, by name.
        ring: A ring for all layouts.
        raw: The other end of UCX alone.
        ray: Ray, where it is measured.
    """

    def __init__(
        self,
        fields: TensorDict,
        transport: UCXXTransport,
        clients: dict[str, Any],
        ring: Ring,
        raw: RawPeer,
        ray: Any,
    ) -> None:
        """Allocate what is used again in each round."""
        self.n = len(fields)
        self.parts = bytes_of(fields)
        self.nbytes = sum(len(part) for part in self.parts)
        self._fields = fields
        self._transport = transport
        self._ids = [f"s{at}" for at in range(self.n)]
        self._ring = ring
        self._ray = ray
        self._source = np.ones(self.nbytes, np.uint8)
        self._target = np.ones(self.nbytes, np.uint8)
        self.works: dict[str, Callable[[], Awaitable[float | None]]] = {
            **{f"put, {way}": self._put(client) for way, client in clients.items()},
            "ring": self._write_ring,
            "publish": self._publish,
            "memcpy": self._copy,
            "memcpy, fresh": self._copy_fresh,
            "raw ucx": lambda: raw.send(self.nbytes),
        }
        if ray is not None:
            self.works["ray"] = self._put_in_ray

    def _put(self, client: Any) -> Callable[[], Awaitable[float]]:
        async def put() -> float:
            began = time.perf_counter()
            await client.put_samples(self._ids, "p", self._fields)
            took = time.perf_counter() - began
            await client.clear_samples(self._ids, "p")
            return took

        return put

    async def _write_ring(self) -> None:
        self._ring.write(self.parts)

    async def _publish(self) -> float:
        """Publish rows as a put would; nobody reads them, so the slots that it names need not be there."""
        directory = self._transport._directory  # noqa: SLF001 - it is measured
        host = HostRef("nobody", 1, ())
        names = tuple(self._fields.keys())
        refs = (SlotRef(host, 0, 1, names, range(self.n), range(self.n)),)
        block = Block.from_fields(self._fields, self.n)
        nbytes = {name: tuple(column.row_nbytes().tolist()) for name, column in block.columns.items()}
        call = Publish(tuple(self._ids), "p", refs, None, block.observed(), nbytes)
        began = time.perf_counter()
        await directory.publish(OperationId(uuid.uuid4().hex, 60.0), call, "benchmark")
        took = time.perf_counter() - began
        await directory.clear(OperationId(uuid.uuid4().hex, 60.0), "p", tuple(self._ids), None, None, None)
        return took

    async def _copy(self) -> None:
        self._target[:] = self._source

    async def _copy_fresh(self) -> float:
        with mmap.mmap(-1, self.nbytes) as fresh:  # malloc would give memory that was used before
            began = time.perf_counter()
            target = np.frombuffer(fresh, np.uint8)
            target[:] = self._source
            took = time.perf_counter() - began
            del target
        return took

    async def _put_in_ray(self) -> float:
        began = time.perf_counter()
        held = self._ray.put(self._source)
        took = time.perf_counter() - began
        del held
        return took


def ratio(table: Rounds, of: str, by: tuple[str, ...]) -> str:
    """Return the median over rounds of one work by others added up."""
    rounds = zip(table.seconds[of], *(table.seconds[name] for name in by), strict=True)
    return f"{statistics.median(mine / sum(others) for mine, *others in rounds):.2f}"


async def measure(ray: Any, rounds: int) -> None:
    """Measure all layouts."""
    transport = UCXXTransport(CONFIG)
    config = transport.attach_config()
    other = UCXXTransport({**config, "ucxx": {**config["ucxx"], "lane": "off"}}, bootstrap=False)
    clients = {"lane": stack(transport), "wire": stack(other)}
    ring, engine = Ring(600 * MIB), Engine(devices="lo")
    tables: dict[str, Rounds] = {}
    async with raw_peer(engine) as raw:
        for title, make in LAYOUTS.items():
            fields = make()
            await clients["lane"].register_partition("p", list(fields.keys()), 1024, ["t"])
            made = Layout(fields, transport, clients, ring, raw, ray)
            tables[title] = table = Rounds()
            await table.run(made.works, rounds if made.nbytes < 128 * MIB else max(3, rounds // 3))
            await clients["lane"].drop_partition("p")
    await engine.close()
    line("", *tables)
    for name in next(iter(tables.values())).seconds:
        line(name, *[f"{statistics.median(table.seconds[name]) * 1e3:.2f} ms" for table in tables.values()])
    for way in clients:
        put = f"put, {way}"
        line(f"{put}: by ring + publish", *[ratio(table, put, ("ring", "publish")) for table in tables.values()])
        line(f"{put}: memcpy by it", *[ratio(table, "memcpy", (put,)) for table in tables.values()])
        line(f"{put}: fresh memcpy by it", *[ratio(table, "memcpy, fresh", (put,)) for table in tables.values()])
        line(f"{put}: raw ucx by it", *[ratio(table, "raw ucx", (put,)) for table in tables.values()])
        if ray is not None:
            line(f"{put}: by ray", *[ratio(table, put, ("ray",)) for table in tables.values()])
    for client in reversed(clients.values()):
        await client.close()


def main() -> int:
    """Start Ray where it is wanted, and measure, in a namespace where that can be had."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each layout; a third of it of the large ones")
    parser.add_argument("--no-ray", action="store_true", help="without Ray")
    parser.add_argument("--here", action="store_true", help="not in a namespace: UCX listeners bind everywhere")
    args = parser.parse_args()
    if not args.here:
        if subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode:
            print("no network namespace can be had; UCX listeners would bind to all addresses: --here does it anyway")
            return 1
        env = {"UCX_TLS": "tcp,self", "UCX_WARN_UNUSED_ENV_VARS": "n", "OMP_NUM_THREADS": "1", **os.environ}
        command = [*NAMESPACE, sys.executable, "-m", "benchmarks", "put", *sys.argv[1:], "--here"]
        return subprocess.run(command, env=env, check=False).returncode
    torch.set_num_threads(1)
    ray: Any = None
    if not args.no_ray:
        import ray

        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            object_store_memory=1536 * MIB,
            log_to_driver=False,
            _node_ip_address="127.0.0.2",  # for 127.0.0.1 Ray takes the address of the network
        )
    try:
        asyncio.run(measure(ray, args.rounds))
    finally:
        if ray is not None:
            ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
