"""A client may be used from one event loop after another, closed on any of them, or not at all: nothing piles up."""

from __future__ import annotations

import gc
import os
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import sniffio
import torch

from .base import Contract
from .rig import PATIENCE_S, declare

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncdp.client import Client

    from .rig import Rig

__all__ = ["ManyLoops"]

#: As many as this may be open beside what there was: those of the last loop, and of what other threads do meanwhile.
SPARE = 6


def descriptors() -> int:
    """How many are open in this process."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are all that is wanted


async def elsewhere(work: Callable[[], Any]) -> Any:
    """Run a function in a thread of its own, while this event loop goes on; what it returns, or raises."""
    ended: list[Any] = []

    def run() -> None:
        try:
            ended.append(work())
        except BaseException as err:  # noqa: BLE001 - raised again below
            ended.append(err)

    thread = threading.Thread(target=run)
    thread.start()
    with anyio.fail_after(12 * PATIENCE_S):
        while thread.is_alive():  # noqa: ASYNC110 - a thread has no event
            await anyio.sleep(0.005)
    if isinstance(ended[0], BaseException):
        raise ended[0]
    return ended[0]


async def fewer(most: int) -> None:
    """Wait until no more than so many descriptors are open; a server needs its time to see that a client is gone."""
    with anyio.fail_after(PATIENCE_S):
        while descriptors() > most:
            gc.collect()
            await anyio.sleep(0.02)


class ManyLoops(Contract):
    """A client may be used from one event loop after another, closed on any of them, or not at all."""

    async def test_one_client_over_many_loops(self, rig: Rig) -> None:
        """U4: an event loop per call, as in a synchronous program: the same few descriptors and threads all along."""
        await declare(rig.client)
        library = sniffio.current_async_library()
        client = await rig.attach()
        await elsewhere(lambda: anyio.run(client.ping, backend=library))
        before, counts = (descriptors(), threading.active_count()), []

        async def step(at: int) -> None:
            await client.put_samples([f"s{at}"], "p", {"x": torch.full((1, 1 << 12), float(at))})
            got = await client.get_samples([f"s{at}"], "p", ["x"])
            assert float(got["x"][0, -1]) == at

        def steps() -> None:
            for at in range(25):
                anyio.run(step, at, backend=library)
                counts.append((descriptors(), threading.active_count()))

        gc.collect()
        gc.disable()  # what is left to the collector counts
        try:
            await elsewhere(steps)
        finally:
            gc.enable()
        assert max(open_ for open_, _ in counts) <= before[0] + SPARE, counts
        assert max(running for _, running in counts) <= before[1] + SPARE, counts
        assert (await client.describe("p")).size == 25
        await client.close()

    @pytest.mark.parametrize("how", ["closed here", "closed there", "closed in another", "collected"])
    async def test_after_its_end_nothing_is_left(self, rig: Rig, how: str) -> None:
        """U4: closed on the loop that used it, on another one, or collected unclosed: all descriptors are back."""
        await declare(rig.client)
        await rig.client.put_samples(["a"], "p", {"x": torch.ones(1, 1 << 19)})
        library = sniffio.current_async_library()

        async def use(client: Client, *then: Callable[[], Awaitable[None]]) -> None:
            got = await client.get_samples(["a"], "p", ["x"])
            assert float(got["x"][0, -1]) == 1.0
            for one in then:
                await one()

        async def once() -> None:
            client = await rig.attach()
            if how == "closed here":
                await use(client, client.close)
            elif how == "closed there":
                await elsewhere(lambda: anyio.run(use, client, client.close, backend=library))
            else:
                await elsewhere(lambda: anyio.run(use, client, backend=library))
            if how == "closed in another":
                await client.close()
            if how == "collected":
                rig.lose(client)

        await once()
        gc.collect()
        before = descriptors()
        for _ in range(SPARE + 2):
            await once()
        await fewer(before + SPARE)
