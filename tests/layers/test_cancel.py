"""Cancel every verb that does more than one thing, at each of its await points, under faults."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import anyio
import pytest
import torch

from asyncdp import DataPlaneError, MemoryTransport
from asyncdp.calls import Call
from asyncdp.testing import FaultPlan, run_virtual
from tests.layers.rig import Rig, Wire, rows

IDS = ["s0", "s1", "s2", "s3"]
OLD, NEW = rows(4), rows(4, 0, 50.0)


class Points:
    """Counts await points of one call and its children; at the chosen one it cancels."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.passed = 0
        self.cancel: Callable[[], object] = lambda: None

    def watch(self, going: Coroutine[Any, Any, Any]) -> Awaitable[Any]:
        """Wrap a coroutine so that each of its suspensions counts."""
        return _Watched(going, self)

    def hit(self) -> None:
        """Count one; cancel if it is the one."""
        self.passed += 1
        if self.passed == self.at:
            self.cancel()


class _Watched:
    def __init__(self, going: Coroutine[Any, Any, Any], points: Points) -> None:
        self.going, self.points = going, points

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self.going.__await__()
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                told = inner.send(value) if error is None else inner.throw(error)
            except StopIteration as end:
                return end.value
            self.points.hit()
            value = error = None
            try:
                value = yield told
            except BaseException as err:  # noqa: BLE001 - thrown into the inner coroutine
                error = err


async def put(rig: Rig) -> None:
    """Replace four rows on two hosts and merge a tag."""
    await rig.client.put_samples(IDS, "p", {"x": NEW}, [{"v": 1.0}] * 4)


async def put_new(rig: Rig) -> None:
    """Put rows that were not there."""
    await rig.client.put_samples(["n0", "n1"], "p", {"x": rows(2)})


async def get(rig: Rig) -> None:
    """Read rows of both hosts."""
    await rig.get(IDS)


async def claim(rig: Rig) -> None:
    """Claim, waiting: one sample is missing at first."""
    await rig.client.claim_meta("p", "t", ["x"], 5)


async def later(rig: Rig) -> None:
    """Put the sample that the claim waits for."""
    await anyio.sleep(0.3)
    await rig.fill(1, 4)


async def clear(rig: Rig) -> None:
    """Clear two rows."""
    await rig.client.clear_samples(["s0", "s1"], "p")


OPS = {"put": put, "put_new": put_new, "get": get, "claim": claim, "clear": clear}
FAULTS: dict[str, Callable[[], FaultPlan]] = {
    "none": FaultPlan,
    "refused": lambda: FaultPlan().refuse(times=3),
    "slow": lambda: FaultPlan().delay(0.5),
    "lost replies": lambda: FaultPlan().lose_reply(times=2).lose_reply(after=2, times=1),
    "silent": lambda: FaultPlan().silent(after=1, times=1).on(host="host-0").silent(times=1),
    "truncated": lambda: FaultPlan().truncate(times=2).not_ready(0.1, after=2, times=1),
}
HOW = [("asyncio", "scope"), ("asyncio", "native"), ("trio", "scope")]
#: As a scope cancels on asyncio it does on trio, and natively is how asyncio's own tasks do.
SLICE = [pytest.param(*HOW[0], marks=pytest.mark.slow), *HOW[1:]]


async def one(op: str, fault: str, at: int | None, how: str) -> int:
    """Run one call, cancel it at one await point, look at what is left; return how many points it passed."""
    async with Rig(FAULTS[fault](), hosts=2, ports=2, attempt_timeout_s=2.0, config={"claim_lease_s": None}) as rig:
        await rig.fill(2)
        await rig.plain.put_samples(IDS[2:], "p", {"x": OLD[2:]}, [{"v": 0.0}] * 2)
        assert all(host.counts()["ready"] for host in rig.hosts)
        client = rig.client = rig.attach(MemoryTransport(rig.transport.attach_config(), bootstrap=False))
        points = Points(at)

        async def watched(_: Call[Any], going: Coroutine[Any, Any, Any]) -> Any:
            return await points.watch(going)

        rig.layer(Wire).hook = watched
        async with anyio.create_task_group() as group:
            if op == "claim":
                group.start_soon(later, rig)
            if how == "native":
                cancelled = await _native(OPS[op](rig), points)
            else:
                with anyio.CancelScope() as scope:
                    points.cancel = scope.cancel
                    await points.watch(OPS[op](rig))
                cancelled = scope.cancelled_caught
            passed = points.passed
        rig.layer(Wire).hook = None
        assert cancelled == (at is not None), "a cancel was swallowed"
        await _look(rig, op, cancelled=cancelled)
        await client.close()
        assert len(client.env.pending_outcomes) == 0
        assert rig.leftovers() == {}
        assert rig.slots()["writing"] == 0
        assert sum(host.counts()["ready"] for host in rig.hosts) == len(rig.transport.plane.partitions["p"].rows)
        if cancelled:
            assert await rig.plain.list_claims("p", "t") == []
        return passed


async def _native(going: Coroutine[Any, Any, None], points: Points) -> bool:
    async def run() -> None:
        await points.watch(going)

    task = asyncio.create_task(run())
    points.cancel = task.cancel
    await asyncio.wait([task])
    if task.cancelled():
        return True
    task.result()
    return False


async def _look(rig: Rig, op: str, *, cancelled: bool) -> None:
    """Check what the call left behind, and that the next call on the client gets its own reply."""
    assert rig.leftovers() == {}
    assert rig.client.env.open_waits.scopes == {}
    there = sorted(rig.transport.plane.partitions["p"].rows)
    if op == "put":
        got = (await rig.plain.get_samples(IDS, "p", ["x"]))["x"]
        tags = {row.tags["v"] for row in rig.transport.plane.partitions["p"].rows.values()}
        whole = torch.equal(got, NEW) and tags == {1.0}
        assert whole or (cancelled and torch.equal(got, OLD) and tags == {0.0})
    elif op == "put_new":
        assert there in (IDS, ["n0", "n1", *IDS])
        assert cancelled or len(there) == 6
    elif op == "clear":
        assert there in (IDS, IDS[2:])
    if op != "clear":
        expected = (await rig.plain.get_samples(["s3"], "p", ["x"]))["x"]
        assert torch.equal((await rig.client.get_samples(["s3"], "p", ["x"]))["x"], expected)


@pytest.mark.parametrize(("backend", "how"), SLICE)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("op", OPS)
def test_a_cancel_at_any_point_leaves_nothing_behind(op: str, fault: str, backend: str, how: str) -> None:
    """At each await point, by scope and natively: whole or absent, no permit, probe, slot, task; settled by close()."""
    clean = run_virtual(lambda: one(op, fault, None, how), backend)
    assert clean >= 2
    for at in range(1, clean + 1):
        run_virtual(lambda at=at: one(op, fault, at, how), backend)


@pytest.mark.parametrize(("backend", "how"), HOW)
def test_what_a_cancelled_claim_took_comes_back_with_the_next_claim(backend: str, how: str) -> None:
    """C2: whatever point a claim is cancelled at, the next claim of the client finds every sample once."""

    async def once(at: int | None) -> int:
        async with Rig(FaultPlan().lose_reply("claim_meta", times=1)) as rig:
            await rig.fill(4)
            points = Points(at)

            async def going() -> None:
                await rig.client.claim_meta("p", "t", ["x"], 3)

            cancelled = False
            if how == "native":
                cancelled = await _native(going(), points)
            else:
                with anyio.CancelScope() as scope:
                    points.cancel = scope.cancel
                    await points.watch(going())
                cancelled = scope.cancelled_caught
            meta = await rig.client.claim_meta("p", "t", ["x"], 4, min_batch_size=1)
            assert meta.sample_ids == (["s0", "s1", "s2", "s3"] if cancelled else ["s3"])
            return points.passed

    for at in range(1, run_virtual(lambda: once(None), backend) + 1):
        run_virtual(lambda at=at: once(at), backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_cancelled_close_can_be_repeated_by_nobody_and_hangs_nobody(backend: str) -> None:
    """close() cancelled in the middle of settling leaves the client closed, and ends."""

    async def main() -> None:
        async with Rig(FaultPlan().on(call="Publish").silent(times=1).on(call="Resolve").silent()) as rig:
            client = rig.attach(MemoryTransport(rig.transport.attach_config(), bootstrap=False))
            with anyio.move_on_after(1.0):
                await client.put_samples(["a"], "p", {"x": rows(1)})
            with anyio.move_on_after(1.0) as scope:
                await client.close()
            assert scope.cancelled_caught
            with pytest.raises(DataPlaneError, match="closed"):
                await client.ping()
            await client.close()

    run_virtual(main, backend)
