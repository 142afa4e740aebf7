"""Promise 10b: a process may fork; a child's use of the plane is refused, and other children have no effect."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

from asyncdp import DataPlaneBadRequest, DataPlaneError, stack

from ...verbs import VERBS
from ..base import Contract
from ..children import Child, fork, forked
from ..rig import declare, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdp.client import Client

    from ..rig import Rig

__all__ = ["Forks"]

#: Elements of a row of 2 MiB, which is more than any transport sends in one message or keeps outside its pools.
WIDE = 1 << 19


async def fill(rig: Rig) -> None:
    """Put two wide rows and read them with both clients, so that all connections are open."""
    await declare(rig.client)
    x = torch.arange(2.0)[:, None].expand(2, WIDE)
    await rig.client.put_samples(["a", "b"], "p", {"x": x})
    for client in (rig.client, rig.mate):
        await goes_on(client)


async def goes_on(client: Client, times: int = 1) -> None:
    """Check that reads still return the right rows."""
    for _ in range(times):
        got = await client.get_samples(["b", "a"], "p", ["x"], timeout_s=20)
        assert got["x"][:, -1].tolist() == [1.0, 0.0]


def collect() -> None:
    """Run the garbage collection that allocations trigger."""
    gc.collect(1)


def collect_all() -> None:
    """Run a full garbage collection."""
    gc.collect()


@contextmanager
def frozen() -> Iterator[None]:
    """Exclude existing objects from garbage collections, which would be slow with those of pytest and torch."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Forks(Contract):
    """Promise 10b: a process may fork; a child's use of the plane is refused, and other children have no effect."""

    @pytest.mark.parametrize("what", ["nothing", "collect", "close", "drop"])
    async def test_a_child_that_does_not_use_the_plane_harms_nobody(self, rig: Rig, what: str) -> None:
        """U2: the child ends, collects garbage, or closes or drops the clients; the parent continues without delay."""
        with frozen():
            await fill(rig)
            await self._harms_nobody(rig, what)

    async def _harms_nobody(self, rig: Rig, what: str) -> None:
        async def close() -> None:
            await rig.client.close()
            await rig.mate.close()

        def drop() -> None:
            rig.__dict__.clear()
            collect_all()

        work: dict[str, Callable[[], Any]] = {
            "nothing": lambda: None,
            "collect": collect_all,
            "close": close,
            "drop": drop,
        }
        async with forked(work[what]) as child:
            await goes_on(rig.client, 3)
            assert await child.code() == 0
            await goes_on(rig.client)
            await goes_on(rig.mate)
        await rig.client.put_samples(["c"], "p", {"x": torch.ones(1, WIDE)})
        assert (await rig.mate.claim_meta("p", "train", ["x"], 3, timeout_s=20)).size == 3

    @pytest.mark.parametrize("verb", ["get_samples", "put_samples"])
    async def test_a_childs_use_of_the_client_is_refused(self, rig: Rig, verb: str) -> None:
        """T9: a call in the child raises DataPlaneBadRequest with a hint; a close there works, the parent continues."""
        await fill(rig)

        async def use() -> None:
            with pytest.raises(DataPlaneBadRequest, match="forked") as caught:
                await VERBS[verb](rig.client, 5)
            assert caught.value.op == verb
            await rig.client.close()

        async with forked(use):
            pass
        await goes_on(rig.client)

    async def test_calls_under_way_go_on(self, rig: Rig) -> None:
        """U2: children that are forked while a claim waits and reads run do not affect these calls."""
        await fill(rig)
        claimed: list[str] = []
        children: list[Child] = []

        async def claim() -> None:
            for _ in range(3):
                claimed.extend((await rig.mate.claim_meta("p", "train", ["x"], 1, timeout_s=60)).sample_ids)

        async with anyio.create_task_group() as group:
            group.start_soon(claim)
            await until(lambda: len(claimed) == 2)
            for _ in range(3):
                group.start_soon(goes_on, rig.client, 4)
                await anyio.sleep(0.002)
                children.append(fork(collect))
            await rig.client.put_samples(["c"], "p", {"x": torch.ones(1, WIDE)})
        assert sorted(claimed) == ["a", "b", "c"]
        assert [await child.code() for child in children] == [0, 0, 0]

    async def test_forks_from_a_thread_and_of_a_child(self, rig: Rig) -> None:
        """U2: a thread forks while reads run, and the child forks a child that collects garbage."""
        await fill(rig)

        async def grandchild() -> int:
            collect()
            async with forked(collect):
                return 0

        children: list[Child] = []
        ready = threading.Event()

        def from_a_thread() -> None:
            ready.wait(10)
            children.append(fork(collect))

        thread = threading.Thread(target=from_a_thread)
        thread.start()
        async with anyio.create_task_group() as group:
            group.start_soon(goes_on, rig.client, 5)
            ready.set()
            async with forked(grandchild):
                await goes_on(rig.mate, 2)
            await anyio.to_thread.run_sync(thread.join)
        assert await children[0].code() == 0
        await goes_on(rig.client)

    async def test_a_child_may_open_a_client_of_its_own(self, rig: Rig) -> None:
        """Promise 10b: it works or raises a typed error soon; in both cases the parent continues."""
        await fill(rig)
        plane = rig.plane()

        async def own() -> int:
            client = stack(plane.attach({"owner": "child"}))
            try:
                with anyio.fail_after(60):
                    await client.put_samples(["c"], "p", {"x": torch.ones(1, 4)}, timeout_s=5)
            except DataPlaneError as err:
                return 3 if str(err) else 1
            finally:
                await client.close()
            return 0

        child = fork(own)
        try:
            await goes_on(rig.client, 2)
            code = await child.code()
        finally:
            child.kill()
        assert code in (0, 3)
        assert (await rig.client.describe("p")).size == (3 if code == 0 else 2)
        await goes_on(rig.client)

    async def test_rows_that_were_read_before_a_fork_stay_the_childs(self, rig: Rig) -> None:
        """R10: if the parent reuses the memory of results, the child's results do not change, and vice versa."""
        await fill(rig)
        rows = {"got": await rig.client.get_samples(["a", "b"], "p", ["x"])}

        def look() -> None:
            assert bool((rows["got"]["x"] == torch.arange(2.0)[:, None]).all())
            rows["got"]["x"].fill_(7.0)
            rows.clear()
            collect()

        await rig.client.put_samples(["a", "b"], "p", {"x": torch.full((2, WIDE), 5.0)})
        async with forked(look, waits=True) as child:
            rows.clear()
            for _ in range(3):
                await rig.client.get_samples(["a", "b"], "p", ["x"])
            got = await rig.client.get_samples(["a", "b"], "p", ["x"])
            child.go_on()
            assert await child.code() == 0
            assert bool((got["x"] == 5.0).all())

    async def test_closing_does_not_wait_for_a_child(self, rig: Rig) -> None:
        """Promise 10b: a running child does not delay the parent's close."""
        await fill(rig)
        owner = await rig.open()
        await declare(owner)
        await owner.put_samples(["a"], "p", {"x": torch.ones(1, 4)})
        async with forked(collect, waits=True):
            with anyio.fail_after(60):
                await rig.mate.close()
                await rig.end(owner)
            await goes_on(rig.client)
