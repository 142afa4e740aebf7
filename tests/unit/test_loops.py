"""One client in several event loops, threads and processes: it works, or says so."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest
import torch

from asyncdp import (
    DataPlaneBadRequest,
    MemoryTransport,
    stack,
)
from asyncdp.testing.contract.rig import declare

if TYPE_CHECKING:
    from asyncdp.client import Client

pytestmark = pytest.mark.anyio


def _fresh() -> Client:
    return stack(MemoryTransport())


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_one_client_in_one_loop_after_another(backend: str) -> None:
    """T9: two event loops, one after the other: works."""
    client = _fresh()
    anyio.run(lambda: declare(client), backend=backend)
    anyio.run(lambda: client.put_samples(["a"], "p", {"x": torch.zeros(1)}), backend=backend)
    assert anyio.run(lambda: client.depth("p"), backend=backend) == 1
    anyio.run(client.close, backend=backend)


def test_one_client_in_two_threads_says_so() -> None:
    """T9: used by a second loop while a call of the first is under way: DataPlaneBadRequest; afterwards it works."""
    client = _fresh()
    waiting, problems = threading.Event(), []

    async def first() -> None:
        await declare(client)
        async with anyio.create_task_group() as group:
            group.start_soon(claim)
            await anyio.sleep(0.02)
            waiting.set()
            await anyio.to_thread.run_sync(second.join)
            group.cancel_scope.cancel()

    async def claim() -> None:
        await client.claim_meta("p", "train", ["x"], 1)

    def use() -> None:
        waiting.wait(60)
        try:
            anyio.run(client.ping)
        except DataPlaneBadRequest as err:
            problems.append(err)

    second = threading.Thread(target=use)
    second.start()
    anyio.run(first)
    assert len(problems) == 1
    assert "thread" in str(problems[0])
    anyio.run(client.ping)
    anyio.run(client.close)


def test_clients_of_two_threads_share_a_plane() -> None:
    """T9: one client per loop and thread: puts of one wake the waiting claim of the other."""
    client = _fresh()
    anyio.run(lambda: declare(client))
    mate = stack(MemoryTransport(client.attach_config(), bootstrap=False))
    got: list[str] = []

    def consume() -> None:
        async def claim() -> None:
            for _ in range(20):
                got.extend((await mate.claim_meta("p", "train", ["x"], 1, timeout_s=9)).sample_ids)

        anyio.run(claim)

    async def produce() -> None:
        for i in range(20):
            await client.put_samples([f"s{i}"], "p", {"x": torch.zeros(1)})

    thread = threading.Thread(target=consume)
    thread.start()
    anyio.run(produce)
    thread.join(60)
    assert got == [f"s{i}" for i in range(20)]
    anyio.run(client.close)


def test_many_threads_consume_one_plane_exactly_once() -> None:
    """T9, C4: four threads, each with its own loop and client, produce and consume; each sample is claimed once."""
    client = _fresh()
    anyio.run(lambda: declare(client))
    config, got, problems = client.attach_config(), [], []

    async def work(number: int) -> None:
        mine = stack(MemoryTransport(config, bootstrap=False))
        for i in range(30):
            await mine.put_samples([f"{number}-{i}"], "p", {"x": torch.full((1,), float(i))})
            meta = await mine.claim_meta("p", "train", ["x"], 1, timeout_s=9)
            data = await mine.get_data(meta)
            got.append((meta.sample_ids[0], float(data["x"])))
        await mine.close()

    def run(number: int) -> None:
        try:
            anyio.run(work, number)
        except BaseException as err:  # noqa: BLE001 - looked at below
            problems.append(err)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not problems
    assert sorted(got) == sorted((f"{n}-{i}", float(i)) for n in range(4) for i in range(30))
    anyio.run(client.close)


def test_a_loop_that_died_with_a_waiting_claim_harms_nobody() -> None:
    """X3: a loop that was closed without a word leaves a waiter behind; other clients' puts go on, and both close."""
    import asyncio

    client = _fresh()
    anyio.run(lambda: declare(client))
    mate = stack(MemoryTransport(client.attach_config(), bootstrap=False))
    loop = asyncio.new_event_loop()
    task = loop.create_task(mate.claim_meta("p", "train", ["x"], 1, timeout_s=60))
    loop.run_until_complete(asyncio.sleep(0.02))
    task._log_destroy_pending = False
    loop.close()
    anyio.run(lambda: client.put_samples(["a"], "p", {"x": torch.zeros(1)}))
    assert anyio.run(lambda: client.depth("p")) == 1
    anyio.run(mate.close)
    anyio.run(client.close)


def test_a_forked_child_says_so() -> None:
    """T9: after fork the child's use of the parent's client is DataPlaneBadRequest; the parent's goes on."""
    client = _fresh()
    anyio.run(client.ping)
    child = os.fork()
    if not child:
        code = 1
        try:
            anyio.run(client.ping)
        except DataPlaneBadRequest as err:
            anyio.run(client.close)
            code = 0 if "fork" in str(err) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    anyio.run(client.ping)
    anyio.run(client.close)
