import asyncio
import os
import random
from typing import Any

import pytest

from asyncdp.calls.answers import verify
from asyncdp.calls.slots import ReadSlots, SlotRef
from asyncdp.errors import DataPlaneError, DataPlaneNotReady, StaleSlotError
from asyncdp.process.buffer_pool import BufferPool
from asyncdp.process.private_mapping import mapping_at
from asyncdp.rows.block import PICKLE
from asyncdp.transports.ucxx.client.host_client import HostClient, Route
from asyncdp.transports.ucxx.wire.engine import Engine
from tests.ucxx.hosts import needs_ucx, pool_of, spawned
from tests.ucxx.segments import rows

pytestmark = [pytest.mark.anyio, *needs_ucx()]

#: Seconds of it; more by ASYNCDP_STRESS_S.
SECONDS = float(os.environ.get("ASYNCDP_STRESS_S", "6"))


class Stress:
    """Puts, reads, clears and cancels at random, over wire and lane, in a small arena."""

    def __init__(self, ways: list[HostClient], here: Any, route: Route, seed: int) -> None:
        self.ways = ways
        self.here = here
        self.route = route
        self.rng = random.Random(seed)
        self.live: dict[str, tuple[tuple[SlotRef, ...], float]] = {}
        self.open: set[str] = set()
        self.counts = {"puts": 0, "reads": 0, "rows": 0, "stale": 0, "full": 0, "cancelled": 0, "borrowed": 0}
        #: Borrowed values, with what they have to be for as long as they are held.
        self.held: list[tuple[Any, float]] = []
        self.number = 0

    async def put(self) -> None:
        """Put rows that all hold the put's own number; given up if anything goes wrong on the way."""
        self.number += 1
        number, op_id = float(self.number), f"op{self.number}"
        block = rows(self.rng.randint(1, 4), self.rng.choice([4, 5_000, 60_000]), number)
        way = self.rng.choice(self.ways)
        try:
            sizes = block.row_nbytes().tolist()
            refs = await way.reserve(self.here, self.route, op_id, ("a",), sizes, 0, ttl_s=30.0, wait_s=0.02)
            await way.write(self.here, self.route, op_id, refs, block)
        except DataPlaneNotReady:
            self.counts["full"] += 1
            return
        except BaseException:
            self.open.add(op_id)
            raise
        self.live[op_id] = (refs, number)
        self.counts["puts"] += 1

    async def read(self) -> None:
        """Read rows of several puts at once: each is right, or stale because it was cleared; some are borrowed."""
        names = self.rng.sample(sorted(self.live), min(len(self.live), self.rng.randint(1, 6)))
        asked = [(ref, self.live[name][1], name) for name in names for ref in self.live[name][0]]
        if not asked:
            return
        refs = tuple(ref for ref, _, _ in asked)
        way = self.rng.choice(self.ways)
        borrow = self.rng.random() < 0.5
        result = verify(await way.read(self.here, self.route, refs, borrow=borrow), ReadSlots(self.here, refs))
        for at, err in result.errors.items():
            assert isinstance(err, (StaleSlotError, DataPlaneNotReady)), err
            assert not isinstance(err, StaleSlotError) or asked[at][2] not in self.live, "stale though it lives"
            self.counts["stale"] += 1
        for part in result.parts:
            values: Any = part.block.columns["a"].values  # type: ignore[attr-defined]
            first = 0
            for at in part.refs:
                count = len(refs[at].rows)
                assert (values[first : first + count] == asked[at][1]).all(), "another put's bytes"
                first += count
                self.counts["rows"] += count
            if mapping_at(values.untyped_storage().data_ptr()) is not None:
                self.counts["borrowed"] += 1
                self.held.append((values[-1], asked[part.refs[-1]][1]))
        for row, number in self.held:
            assert (row == number).all(), "another put's bytes in a borrowed row"
        if len(self.held) > 4:
            del self.held[self.rng.randrange(len(self.held))]
        self.counts["reads"] += 1

    async def clear(self) -> None:
        """Clear a put."""
        if len(self.live) > 16:
            name = self.rng.choice(sorted(self.live))
            refs, _ = self.live.pop(name)
            cells = [(ref.slot, ref.generation, ref.index, ()) for ref in refs]
            await self.dropped(cells)

    async def dropped(self, cells: Any) -> None:
        """Drop cells, whatever it takes: what was cleared must not leak because a call was cancelled."""
        await asyncio.shield(asyncio.ensure_future(self.ways[0].drop(self.here, self.route, cells)))

    async def worker(self, until: float) -> None:
        """Do one thing after the other, some of it cut off, until all has happened that must."""
        loop = asyncio.get_running_loop()
        while loop.time() < until or (not self.all_happened() and loop.time() < until + 60):
            work = self.rng.choice([self.put, self.read, self.read, self.clear])
            task = asyncio.ensure_future(work())
            if work != self.clear and self.rng.random() < 0.2:
                await asyncio.sleep(self.rng.random() * 0.01)
                task.cancel()
                self.counts["cancelled"] += 1
            (problem,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(problem, Exception):
                raise problem
            await self.give_up()

    def all_happened(self) -> bool:
        """Whether everything has happened, but that a reader met a slot just as it was freed, which is chance."""
        return min(count for what, count in self.counts.items() if what != "stale") > 0

    async def give_up(self) -> None:
        """Give up what was cut off."""
        for op_id in list(self.open):
            if self.rng.random() < 0.5:
                for way in self.ways:  # only the one who copies knows that it copies no more
                    if op_id not in way._copying:
                        await way.abort(self.here, self.route, op_id)
                self.open.discard(op_id)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
async def test_no_wrong_byte_and_no_space_lost_under_cancels(seed: int) -> None:
    """Four workers at once: every row read is its put's own, and in the end every slot is free."""
    engine, buffers = Engine(devices="lo"), BufferPool()
    with spawned(ucx=True, arena_bytes=4 << 20, max_slot_bytes=2 << 20, rows_per_slot=2, checksum=True) as host:
        route = Route(host.told["address"], host.told["boot_id"], host.told["arena"])
        with pool_of(engine) as pool:
            ways = [HostClient(pool, PICKLE, buffers, lane=False), HostClient(pool, PICKLE, buffers)]
            stress = Stress(ways, host.ref, route, seed)
            until = asyncio.get_running_loop().time() + SECONDS
            await asyncio.gather(*[stress.worker(until) for _ in range(4)])
            stress.held.clear()
            for op_id in [*stress.open, *stress.live]:
                for way in ways:
                    await way.abort(host.ref, route, op_id)
            async with asyncio.timeout(60):
                while True:
                    facts = await ways[0].ask(host.ref, route)
                    if not any(facts[state] for state in ("ready", "writing", "given_up", "reading")):
                        break
                    await asyncio.sleep(0.1)
            assert facts["free_bytes"] == int(facts["units"]) * (16 << 10)
            assert stress.all_happened(), stress.counts
            with pytest.raises(DataPlaneError):
                await ways[1].write(host.ref, route, "nobody's", [SlotRef(host.ref, 0, 1, ("a",), [0], [0])], rows(1))
    await engine.close()
