"""Slot hosts are told which rows are gone by calls that the layers rule like all others."""

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from asyncdp import DataPlaneUnavailable, MemoryTransport
from asyncdp.calls import Call, CallContext, ClearSamples, EvictSamples, PopSamples, handles
from asyncdp.calls.slots import HostRef, Invalidate, Resolve, Resolved, SlotRef
from asyncdp.compose.invalidations import record
from asyncdp.errors import DataPlaneError
from tests.layers.rig import Rig, rows, virtual

PORTS = (1, 2, 3, 4)
Hears = Callable[[int], Any]


class Telling(MemoryTransport):
    """A plane whose hosts need to be told of each removed row; the row's number stands for its slot."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hears: dict[str, Hears] = {}
        self.told: list[tuple[str, int]] = []
        self.gone: set[str] = set()
        self.killed: dict[str, list[str]] = {}
        self.lost = False

    def hosts_of(self, sample_id: str) -> list[HostRef]:
        """Hosts with a part of the row: one, or two where its name says so."""
        names = ("h", "g") if sample_id.endswith("both") else (sample_id[0],)
        return [HostRef(name, 1, PORTS) for name in names]

    @handles(ClearSamples, PopSamples, EvictSamples)
    async def removed(self, call: ClearSamples, ctx: CallContext) -> int:
        """Remove, and say whom to tell; if the answer is lost, nobody is."""
        count = await self._clear(call, ctx)
        new = [sample_id for sample_id in call.sample_ids or () if sample_id not in self.gone]
        self.gone.update(new)
        self.killed[ctx.op_id] = new
        if self.lost:
            raise DataPlaneUnavailable("the answer is lost", ambiguous=True)
        self.record(ctx.op_id, call, ctx)
        return count

    @handles(Resolve)
    async def resolved(self, call: Resolve, ctx: CallContext) -> Resolved:
        """Say what became of a removal, and whom to tell of it."""
        resolved = await self._resolve(call, ctx)
        if call.of is not None:
            self.record(call.op_id, call.of, ctx)
        return resolved

    def record(self, op_id: str, mutation: Call[Any], ctx: CallContext) -> None:
        """Record the rows that a removal has removed."""
        for at, sample_id in enumerate(self.killed[op_id]):
            hosts, slot = self.hosts_of(sample_id), int(sample_id[1])
            record([Invalidate(host, (SlotRef(host, slot, 1, (), (at,), ()),)) for host in hosts], ctx, mutation)

    @handles(Invalidate)
    async def hear(self, call: Invalidate, ctx: CallContext) -> None:
        """Answer as the test says: an error raised, an await, or at once."""
        del ctx
        assert call.port is not None
        answer = self.hears.get(call.host.id, lambda _: None)(call.port)
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            await answer
        self.told += [(call.host.id, ref.slot) for ref in call.refs]


def rig(**settings: Any) -> Any:
    """A rig around such a plane."""
    return Rig(transport=Telling, **settings)


def dead(port: int) -> Exception:
    """The error of a port that is gone."""
    return DataPlaneUnavailable(f"port {port} is gone", port=port)


@virtual
async def test_each_host_is_told_of_its_own_before_the_removal_returns() -> None:
    """In one request a host, however many rows; a put later tells nobody again."""
    async with rig() as world:
        await world.client.evict(["h1", "g2", "h3", "h5both"], "p")
        assert sorted(world.transport.told) == [("g", 2), ("g", 5), ("h", 1), ("h", 3), ("h", 5)]
        assert len(world.wire("Invalidate")) == 2
        await world.client.put_samples(["h1"], "p", {"x": rows(1)})
        assert len(world.wire("Invalidate")) == 2
        assert not len(world.client.env.pending_outcomes)


@virtual
async def test_a_broken_port_is_rotated_and_quarantined() -> None:
    """At the price of one token; the next removal does not try it."""
    async with rig() as world:
        bad: list[int] = []

        def first(port: int) -> Exception | None:
            bad[:] = bad or [port]
            return dead(port) if port == bad[0] else None

        world.transport.hears["h"] = first
        await world.client.pop(["h1"], "p")
        assert world.transport.told == [("h", 1)]
        assert world.events["rotation"] == world.events["quarantine"] == 1
        for number in range(2, 8):
            await world.client.pop([f"h{number}"], "p")
        assert [sent.port for sent in world.wire("Invalidate")].count(bad[0]) == 1


@virtual
async def test_a_silent_port_costs_one_attempt() -> None:
    """AttemptTimeout ends it, as it does any other request."""
    async with rig(attempt_timeout_s=3.0) as world:
        silent: list[int] = []

        def first(port: int) -> Any:
            silent[:] = silent or [port]
            return anyio.sleep_forever() if port == silent[0] else None

        world.transport.hears["h"] = first
        began = anyio.current_time()
        await world.client.clear_samples(["h1"], "p")
        assert anyio.current_time() - began == pytest.approx(3.0)
        assert world.transport.told == [("h", 1)]


@virtual
async def test_a_host_that_may_still_serve_makes_the_removal_ambiguous_and_is_told_later() -> None:
    """The error names the host; the next mutation tells it, and the counters learn that the rows are gone."""
    async with rig() as world:
        await world.client.put_samples(["h1"], "p", {"x": rows(1)})
        world.transport.hears["h"] = dead
        with pytest.raises(DataPlaneUnavailable, match="slot host 'h' may still serve them") as caught:
            await world.client.evict(["h1"], "p")
        assert caught.value.ambiguous
        assert len(world.wire("Invalidate")) <= 8  # four attempts, two ports each
        assert world.client.snapshot()["n_keys_outstanding"] == 1
        world.transport.hears.clear()
        await anyio.sleep(1)
        await world.client.evict(["h2"], "p")
        assert sorted(world.transport.told) == [("h", 1), ("h", 2)]
        assert world.client.snapshot()["n_keys_outstanding"] == 0


@virtual
async def test_a_call_without_time_of_its_own_tells_the_host_or_leaves_it_alone() -> None:
    """A claim that looks once has time to clean up; a call of a few milliseconds does not make a host look silent."""
    for short in ({"timeout_s": 0}, {"timeout_s": 0.01}):
        async with rig() as world:
            world.transport.hears["h"] = dead
            with pytest.raises(DataPlaneUnavailable):
                await world.client.evict(["h1"], "p")
            world.transport.hears.clear()
            await anyio.sleep(60)
            with pytest.raises(DataPlaneError):
                await world.client.claim_meta("p", "train", ["x"], 1, **short)
            assert (world.transport.told == [("h", 1)]) == (not short["timeout_s"])
            await world.client.evict(["g2"], "p")
            assert sorted(world.transport.told) == [("g", 2), ("h", 1)]


@virtual
async def test_a_spent_budget_ends_the_retries() -> None:
    """The error goes up after one request, and what was not delivered is kept."""
    async with rig() as world:
        world.client.env.budget = type("Spent", (), {"deposit": lambda *_: None, "withdraw": lambda *_: False})()
        world.transport.hears["h"] = dead
        with pytest.raises(DataPlaneUnavailable):
            await world.client.evict(["h1"], "p")
        assert len(world.wire("Invalidate")) == 1
        assert len(world.client.env.pending_outcomes) == 1


@virtual
async def test_a_host_that_was_told_late_fails_nobody_elses_call() -> None:
    """It costs a second of the first mutation after it, and then nothing for half a minute."""
    async with rig() as world:
        world.transport.hears["h"] = lambda _: anyio.sleep_forever()
        with pytest.raises(DataPlaneError):
            await world.client.evict(["h1"], "p", timeout_s=2.0)
        began = anyio.current_time()
        await world.client.evict(["g1"], "p")
        assert anyio.current_time() - began <= 1.5
        began = anyio.current_time()
        for number in range(2, 6):
            await world.client.evict([f"g{number}"], "p")
        assert anyio.current_time() == began
        assert [slot for host, slot in world.transport.told if host == "g"] == [1, 2, 3, 4, 5]


@virtual
async def test_a_removal_that_is_made_again_returns_only_once_the_host_was_told() -> None:
    """Whichever removal names the rows, or the whole partition; one of other rows goes on."""
    async with rig() as world:
        world.transport.hears["h"] = dead
        again = (
            lambda: world.client.evict(["h1"], "p"),
            lambda: world.client.pop(["h1", "g1"], "p"),
            lambda: world.client.drop_partition("p"),
        )
        for call in (again[0], *again):
            with pytest.raises(DataPlaneUnavailable, match="slot host 'h' may still serve them") as caught:
                await call()
            assert caught.value.ambiguous
            await anyio.sleep(60)  # ports are out of quarantine
        await world.client.evict(["g2"], "p")
        assert world.transport.told == [("g", 1), ("g", 2)]
        world.transport.hears.clear()
        await again[0]()
        assert world.transport.told == [("g", 1), ("g", 2), ("h", 1)]
        assert not len(world.client.env.pending_outcomes)


@virtual
async def test_hosts_are_told_of_a_removal_that_turns_out_to_have_happened() -> None:
    """Its answer was lost, so the client learns only later which hosts to tell: before the repetition returns."""
    async with rig(max_attempts=1) as world:
        world.transport.lost = True
        with pytest.raises(DataPlaneUnavailable) as caught:
            await world.client.evict(["h1", "g1"], "p")
        assert caught.value.ambiguous
        world.transport.lost = False
        world.transport.hears["h"] = dead
        with pytest.raises(DataPlaneUnavailable, match="slot host 'h' may still serve them"):
            await world.client.evict(["h1", "g1"], "p")
        assert world.transport.told == [("g", 1)]
        await anyio.sleep(60)
        world.transport.hears.clear()
        await world.client.evict(["h1"], "p")
        assert world.transport.told == [("g", 1), ("h", 1)]


@virtual
async def test_close_tells_hosts_of_a_removal_that_turns_out_to_have_happened() -> None:
    """The close finds out about the removal, and then tells its hosts."""
    async with rig(max_attempts=1) as world:
        world.transport.lost = True
        with pytest.raises(DataPlaneUnavailable):
            await world.client.evict(["h1"], "p")
    assert world.transport.told == [("h", 1)]


@virtual
async def test_what_a_cancelled_call_left_is_told_with_the_next() -> None:
    """The cancel is not held up, and nothing is forgotten."""
    async with rig() as world:
        world.transport.hears["h"] = lambda _: anyio.sleep_forever()
        with anyio.move_on_after(0.5):
            await world.client.pop(["h1"], "p")
        world.transport.hears.clear()
        await world.client.pop(["h2"], "p")
        assert sorted(world.transport.told) == [("h", 1), ("h", 2)]


@virtual
async def test_close_tells_what_is_left() -> None:
    """And ends in time where a host does not listen."""
    async with rig() as world:
        world.transport.hears["h"] = world.transport.hears["g"] = lambda _: anyio.sleep_forever()
        with anyio.move_on_after(0.5):
            await world.client.pop(["h1", "g2"], "p")
        del world.transport.hears["g"]
    assert world.transport.told == [("g", 2)]
    assert world.client.snapshot()["events"]["unsettled"] == 1
