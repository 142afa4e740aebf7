"""The clock and the cancel scopes of a stack are those of the loop on which a call runs, whatever ran before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

import anyio
import pytest
import trio

from asyncdp import DataPlaneTimeout, MemoryTransport, stack
from asyncdp.clock import AnyioClock
from asyncdp.testing.clock import run_virtual

T = TypeVar("T")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_it_is_the_clock_of_cancel_scopes(backend: str) -> None:
    """Also on a second loop after the first, each with a time of its own; wall time advances with it."""
    clock = AnyioClock()

    async def main() -> None:
        began, wall = clock.now(), clock.time()
        assert began == anyio.current_time()
        await anyio.sleep(600)
        assert clock.now() == anyio.current_time() == began + 600
        assert clock.time() == pytest.approx(wall + 600)

    for _ in range(2):
        run_virtual(main, backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_clocks_of_a_loop_agree_on_wall_time(backend: str) -> None:
    """Also where one is first asked later: the plane's, when virtual time has passed for the client's."""

    async def main() -> None:
        first = AnyioClock()
        first.time()
        await anyio.sleep(600)
        assert AnyioClock().time() == first.time()

    run_virtual(main, backend)


def test_wall_time_is_read_anew_for_each_loop() -> None:
    """The clocks of loops begin at numbers of their own, so an offset holds for one loop."""
    clock = AnyioClock()

    async def read() -> float:
        return clock.time() - time.time()

    for _ in range(2):
        assert abs(asyncio.run(read())) < 60
        assert abs(anyio.run(read, backend="trio")) < 60


def as_guest(work: Callable[[], Awaitable[T]]) -> T:
    """Run it on trio as a guest of asyncio: a loop of asyncio is running there too, and is not the one that counts."""

    async def host() -> Any:
        loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        trio.lowlevel.start_guest_run(
            work, run_sync_soon_threadsafe=loop.call_soon_threadsafe, done_callback=done.set_result
        )
        return await done

    return cast("T", asyncio.run(host()).unwrap())


def test_trio_as_a_guest_of_asyncio_has_trio_s_time() -> None:
    """The clocks of loops begin at numbers of their own."""
    clock = AnyioClock()

    async def read() -> float:
        return clock.now() - trio.current_time()

    assert abs(as_guest(read)) < 60


def test_a_client_goes_from_loop_to_loop() -> None:
    """Its attempts have cancel scopes and deadlines of the loop that runs them."""
    client = stack(MemoryTransport())

    async def wait() -> bool:
        await client.ping()
        with pytest.raises(DataPlaneTimeout, match="nobody registered"):
            await client.wait_partition("p", timeout_s=0.5)
        return True

    assert as_guest(wait)
    assert anyio.run(wait)
    assert anyio.run(wait, backend="trio")
    assert anyio.run(wait)
