"""A client may be used from one event loop after another, closed on any of them or never, without leaking resources."""

from __future__ import annotations

import gc
import os
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import sniffio
import torch

from ..base import Contract
from ..rig import PATIENCE_S, declare

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncdp.client import Client

    from ..rig import Rig

__all__ = ["ManyLoops"]

#: Number of additional descriptors that may be open: those of the last loop, and those of other threads.
SPARE = 6


def descriptors() -> int:
    """Return the number of open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are all that is wanted


async def elsewhere(work: Callable[[], Any]) -> Any:
    """Run a function in a new thread without blocking this event loop, and return or raise its outcome."""
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
    """Wait until at most ``most`` descriptors are open; a server needs time to notice that a client is gone."""
    with anyio.fail_after(PATIENCE_S):
        while descriptors() > most:
            gc.collect()
            await anyio.sleep(0.02)


class ManyLoops(Contract):
    """A client may be used from one event loop after another, closed on any of them or never."""

    async def test_one_client_over_many_loops(self, rig: Rig) -> None:
        """U4: with a new event loop for each call, the numbers of descriptors and threads do not grow."""
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
        gc.disable()  # descriptors that only the collector would close count as leaked
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
        """U4: closed on its loop, closed on another one, or collected unclosed, the client frees all descriptors."""
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
