import asyncio
import random
import socket
import time

import anyio
import anyio.lowlevel
import pytest

from asyncdp.testing import VirtualLoop, run_virtual

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


@BACKENDS
def test_hours_pass_at_once(backend: str) -> None:
    """Sleeps and deadlines take virtual time only, exactly as long as asked."""
    ends: list[float] = []

    async def main() -> str:
        began = anyio.current_time()

        async def sleeper(seconds: float) -> None:
            await anyio.sleep(seconds)
            ends.append(round(anyio.current_time() - began, 6))

        async with anyio.create_task_group() as group:
            for seconds in (3000.0, 0.25, 60.0):
                group.start_soon(sleeper, seconds)
            with anyio.move_on_after(5.0):
                await anyio.Event().wait()
            ends.append(round(anyio.current_time() - began, 6))
        return "done"

    began = time.perf_counter()
    assert run_virtual(main, backend) == "done"
    assert ends == [0.25, 5.0, 60.0, 3000.0]
    assert time.perf_counter() - began < 5.0


@BACKENDS
def test_a_hang_is_found(backend: str) -> None:
    """What would wait for ever ends with TimeoutError, at once."""

    async def main() -> None:
        await anyio.Event().wait()

    with pytest.raises(TimeoutError):
        run_virtual(main, backend)


@BACKENDS
def test_a_run_can_be_repeated(backend: str) -> None:
    """The same seed gives the same schedule and the same global random numbers; the caller's are left as they were."""

    def run(seed: int) -> list[object]:
        order: list[object] = []

        async def main() -> None:
            async def task(name: int) -> None:
                for _ in range(3):
                    await anyio.lowlevel.checkpoint()
                    order.append(name)

            async with anyio.create_task_group() as group:
                for name in range(5):
                    group.start_soon(task, name)
            order.append(random.random())

        run_virtual(main, backend, seed)
        return order

    before = random.getstate()
    assert run(3) == run(3)
    assert random.getstate() == before


@BACKENDS
def test_errors_come_out(backend: str) -> None:
    """An exception of the coroutine function is the caller's, unwrapped."""

    async def main() -> None:
        await anyio.sleep(1)
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        run_virtual(main, backend)


def test_the_loop_serves_threads() -> None:
    """A thread that calls in wakes a virtual loop that waits for nothing else."""
    loop = VirtualLoop()
    try:
        assert loop.run_until_complete(loop.run_in_executor(None, lambda: 7)) == 7
        loop.run_until_complete(asyncio.sleep(100))
        assert loop.time() == 100.0
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


def schedule(seed: int, *, shuffle: bool = True) -> list[int]:
    """Run five tasks that are always ready together, a group of them cancelled in the middle; return who ran when."""
    order: list[int] = []

    async def task(name: int) -> None:
        try:
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
                order.append(name)
            await anyio.sleep_forever()
        finally:
            order.append(-name)

    async def main() -> None:
        with anyio.move_on_after(1.0):
            async with anyio.create_task_group() as group:
                for name in range(1, 6):
                    group.start_soon(task, name)

    run_virtual(main, "asyncio", seed, shuffle=shuffle)
    return order


def test_a_seed_orders_the_tasks_of_asyncio() -> None:
    """Shuffled, the order of tasks follows the seed, that of cancelled ones too; not shuffled, they take turns."""
    assert all(schedule(seed) == schedule(seed) for seed in range(20))
    assert len({tuple(schedule(seed)) for seed in range(20)}) > 15
    assert schedule(1, shuffle=False)[:15] == [1, 2, 3, 4, 5] * 3


def test_a_busy_loop_sees_its_files() -> None:
    """A loop that always has something to do still notices what comes from outside."""
    ours, theirs = socket.socketpair()
    theirs.send(b"x")
    ours.setblocking(False)  # noqa: FBT003

    async def main() -> None:
        seen = asyncio.Event()
        asyncio.get_running_loop().add_reader(ours, seen.set)
        for _ in range(10_000):
            if seen.is_set():
                return
            await asyncio.sleep(0)
        pytest.fail("it never looked")

    with ours, theirs:
        run_virtual(main)
