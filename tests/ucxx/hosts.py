"""Slot hosts for tests: in this process or in one of their own, and clients of them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from asyncdp.calls.slots import HostRef, SlotRef
from asyncdp.process.buffer_pool import BufferPool
from asyncdp.rows.block import PICKLE
from asyncdp.transports.ucxx.client.connection_pool import Pool
from asyncdp.transports.ucxx.host.host import Host
from asyncdp.transports.ucxx.host.settings import HostSettings
from asyncdp.transports.ucxx.slots.arena import Arena
from asyncdp.transports.ucxx.wire.handshake import Secret

if TYPE_CHECKING:
    from asyncdp.rows.block import Block
    from asyncdp.transports.ucxx.client.connection import Connection
    from asyncdp.transports.ucxx.wire.engine import Engine

__all__ = ["SECRET", "hosted", "needs_ucx", "pool_of", "put_over", "settings", "spawned"]

ROOT = Path(__file__).parents[2]
SECRET = Secret("a secret for tests")
HAVE_UCX = importlib.util.find_spec("ucxx") is not None


def _can_unshare() -> bool:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    done = subprocess.run(["unshare", "-rn", "ip", "link", "set", "lo", "up"], capture_output=True, check=False)
    return done.returncode == 0


def needs_ucx() -> list[pytest.MarkDecorator]:
    """Marks of a file whose tests open UCX listeners, which bind everywhere: run where there is only loopback.

    ``test_namespace.py`` runs such files there; where no namespace can be had, they run where they are.
    """
    outside = not os.environ.get("ASYNCDP_NETNS") and _can_unshare()
    return [
        pytest.mark.skipif(not HAVE_UCX, reason="needs the extra ucxx (ucxx-cu12)"),
        pytest.mark.skipif(outside, reason="runs in a network namespace, by test_namespace.py"),
    ]


def settings(**keys: Any) -> HostSettings:
    """Settings of a small host on loopback, of a name that no other test has."""
    small = {"host_id": f"h-{uuid.uuid4().hex[:8]}", "ports": 2, "arena_bytes": 8 << 20, "max_slot_bytes": 4 << 20}
    whole = {**small, "plane": "test", "keep_arena": False, "ucx": False, "devices": "lo", **keys}
    return msgspec.convert(whole, HostSettings)


@asynccontextmanager
async def hosted(directory: Any = None, **keys: Any) -> AsyncIterator[Host]:
    """A host on this loop."""
    host = Host(settings(**keys), directory, SECRET)
    await host.start()
    try:
        yield host
    finally:
        await host.stop()


@contextmanager
def pool_of(engine: Engine | None = None, *, secret: Secret = SECRET, **options: Any) -> Iterator[Pool]:
    """A client's pool."""
    pool = Pool(engine, secret, PICKLE, BufferPool(), **options)
    try:
        yield pool
    finally:
        pool.close()


def ref_of(report: Any) -> HostRef:
    """The host as slot calls name it, from its report or its readiness line."""
    told = report if isinstance(report, dict) else {n: getattr(report, n) for n in ("id", "epoch", "ports")}
    return HostRef(told["id"], told["epoch"], tuple(told["ports"]))


async def put_over(
    connection: Connection, host: HostRef, op_id: str, block: Block, **options: Any
) -> tuple[SlotRef, ...]:
    """Reserve and write a block over the wire; returns references to its rows."""
    fields = tuple(block.columns)
    sizes = block.row_nbytes().tolist()
    granted = await connection.reserve(host, op_id, fields, sizes, 0, ttl_s=60.0, wait_s=0.0, lane=False)
    refs = tuple(
        SlotRef(host, slot, generation, fields, range(rows), range(first, first + rows))
        for slot, generation, rows, first in granted.grants
    )
    await connection.write(host, op_id, refs, block, **options)
    return refs


class Spawned:
    """A host in a process of its own.

    Attributes:
        told: Its readiness line.
        ref: The host as slot calls name it.
    """

    def __init__(self, process: subprocess.Popen[str], told: dict[str, Any]) -> None:
        self.process = process
        self.told = told
        self.ref = ref_of(told)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    async def gone(self, timeout_s: float = 60.0) -> int:
        """Wait until it has ended; returns its exit code."""
        async with asyncio.timeout(timeout_s):
            while self.process.poll() is None:  # noqa: ASYNC110 - a process has no event
                await asyncio.sleep(0.01)
        return int(self.process.returncode)


def start(
    namespace: str,
    command: Sequence[str] = ("-m", "asyncdp.transports.ucxx.host.main"),
    *,
    stderr: Any = None,
    **keys: Any,
) -> subprocess.Popen[str]:
    """Start a host; its first line of output tells that it serves."""
    text = msgspec.json.encode(settings(**keys)).decode()
    command = [sys.executable, *command, "--watch-stdin", "--settings", text]
    command += ["--namespace", namespace]
    env = {**os.environ, "ASYNCDP_SECRET": "a secret for tests", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=stderr, text=True, env=env)


@contextmanager
def spawned(namespace: str = "asyncdp", *, stderr: Any = None, **keys: Any) -> Iterator[Spawned]:
    """A host in a process of its own, which is killed at the end if it still lives."""
    process = start(namespace, stderr=stderr, **keys)
    told: dict[str, Any] = {}
    try:
        assert process.stdout is not None
        while not told.get("ready"):
            line = process.stdout.readline()
            assert line, f"the host ended with {process.wait()}"
            with contextlib.suppress(json.JSONDecodeError):
                told = json.loads(line)
        yield Spawned(process, told)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        if told:
            Arena.discard(told["arena"])
