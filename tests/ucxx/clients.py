"""Clients of slot hosts, for tests."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncdp.calls.answers import verify
from asyncdp.calls.slots import ReadSlots
from asyncdp.errors import DataPlaneError
from asyncdp.transports.ucxx.wire.engine import Engine
from tests.ucxx.hosts import Spawned, pool_of, put_over

if TYPE_CHECKING:
    import torch

    from asyncdp.rows.block import Block
    from asyncdp.transports.ucxx.client.connection_pool import Pool

LOCAL = "127.0.0.1"


@asynccontextmanager
async def client(**options: Any) -> AsyncIterator[Pool]:
    """An engine and a pool on it."""
    engine = Engine(devices="lo")
    try:
        with pool_of(engine, **options) as pool:
            yield pool
    finally:
        await engine.close()


async def put(pool: Pool, here: Any, op_id: str, block: Block, **options: Any) -> Any:
    """Put a block over a connection of the pool."""
    async with pool.use(LOCAL, here.ports[0]) as connection:
        return await put_over(connection, here, op_id, block, **options)


async def get(pool: Pool, here: Any, refs: Any, port: int = 0) -> Block:
    """Read rows back, verified; an error of any is raised."""
    async with pool.use(LOCAL, here.ports[port]) as connection:
        result = verify(await connection.read(here, refs), ReadSlots(here, tuple(refs)))
    for err in result.errors.values():
        raise err
    (part,) = result.parts
    return part.block


def value(block: Block) -> torch.Tensor:
    """Field a."""
    out: torch.Tensor = block.columns["a"].values  # type: ignore[attr-defined]
    return out


def cpu_of(pid: int) -> float:
    """Processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def hammer(pool: Pool, here: Any, refs: Any) -> None:
    """Read for ever, until there is nobody to read from."""
    while True:
        try:
            await get(pool, here, refs)
        except DataPlaneError:
            return


def end(host: Spawned, by: str) -> None:
    """End a host in one way or the other."""
    if by == "SIGTERM":
        host.signal(signal.SIGTERM)
    else:
        assert host.process.stdin is not None
        host.process.stdin.close()
