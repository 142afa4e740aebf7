"""CapacityLedger on the memory plane, in virtual time."""

import inspect
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import anyio
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from asyncdp import (
    Client,
    DataPlaneBadRequest,
    DataPlaneError,
    DataPlaneUnavailable,
    DataPlaneUnsupported,
    MemoryTransport,
    stack,
)
from asyncdp.recovery import CapacityLedger, GroupWriter, Reservation
from asyncdp.recovery import ledger as ledger_module
from asyncdp.recovery.reservations import reservation_id
from asyncdp.testing import FaultPlan, faulty_stack, run_virtual

BACKENDS = ["asyncio", "trio"]
#: A history that fails is told as it is: to make it shorter takes minutes.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
FIELDS = {"x": torch.zeros(2)}


def on_a_plane(check: Callable[[Client], Any], plan: FaultPlan | None = None, backend: str = "asyncio") -> None:
    """Run a check with a client of a fresh plane that has a partition of groups of two."""

    async def run() -> None:
        async with faulty_stack(MemoryTransport(), plan or FaultPlan(), attempt_timeout_s=1.0) as client:
            client.env.clock.time()  # virtual time begins: from now on wall time follows it
            await client.register_partition("p", ["x"], 8, ["train"], grpo_group_size=2)
            await check(client)

    run_virtual(run, backend)  # type: ignore[arg-type]


class Other:
    """A client of somebody else's, without a name or a clock."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        if name in ("owner", "env"):
            raise AttributeError(name)
        return getattr(self._client, name)


async def put_group(client: Client, name: str, version: int = 1) -> None:
    """Put a whole group, as a producer that knows no ledger."""
    await client.put_samples([f"{name}_g0", f"{name}_g1"], "p", FIELDS, [{"weight_version": version}] * 2)


async def rows(client: Client) -> set[str]:
    """Return the ids of all rows."""
    return {key for group in await client.list_metadata("p") for key in group.keys}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_place_is_taken_before_work_starts_and_kept_until_the_rows_are_removed(backend: str) -> None:
    """Reserved, committed, popped: each is seen by a ledger of another process, which only lists."""

    async def check(client: Client) -> None:
        ledger, other = CapacityLedger(client, "p", 2), CapacityLedger(client, "p", 2)
        place = await ledger.reserve("a", weight_version=3)
        await other.rebuild()
        assert (ledger.used, ledger.free, ledger.reserved, other.used, other.reserved) == (1, 1, ["a"], 1, ["a"])
        assert (await client.list_metadata("p"))[0].weight_version == 3
        assert await client.depth("p") == 0
        async with GroupWriter(client, "p", "a", size=2, weight_version=3, reservation=place, ledger=ledger) as group:
            await group.put(["a0", "a1"], FIELDS)
        await other.rebuild()
        assert (ledger.used, ledger.reserved, other.used, other.reserved) == (1, [], 1, [])
        assert await rows(client) == {"a0", "a1"}
        await client.pop(["a0", "a1"], "p")
        ledger.freed(["a"])
        await other.rebuild()
        assert (ledger.used, other.used, ledger.capacity) == (0, 0, 2)

    on_a_plane(check, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_reserve_waits_for_a_place_that_another_process_frees(backend: str) -> None:
    """The trainer pops elsewhere; whoever waits lists now and then, and goes on."""

    async def check(client: Client) -> None:
        await put_group(client, "a")
        ledger = CapacityLedger(client, "p", 1, relist_s=2.0)
        await ledger.rebuild()
        assert await ledger.try_reserve("b") is None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ledger.reserve, "b")
            await anyio.sleep(9.0)
            assert ledger.reserved == []
            await client.pop(["a_g0", "a_g1"], "p")
            await anyio.sleep(2.5)
            assert ledger.reserved == ["b"]
            tasks.start_soon(ledger.reserve, "c")
            await anyio.sleep(0.5)
            await ledger.release(Reservation("b", "", "", None, (await client.list_metadata("p"))[0].meta()))
            await anyio.sleep(0.1)
            assert ledger.reserved == ["c"]  # told at once, not with the next listing

    on_a_plane(check, backend=backend)


def test_reserve_waits_for_the_gate() -> None:
    """While the plane is away nobody starts work."""

    async def check(client: Client) -> None:
        ledger = CapacityLedger(client, "p", 1)
        ledger.gate.close()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ledger.reserve, "a")
            await anyio.sleep(9.0)
            assert ledger.used == 0
            ledger.gate.open()
            await anyio.sleep(0.1)
            assert ledger.reserved == ["a"]
        ledger.gate.break_with(DataPlaneUnavailable("for good"))
        with pytest.raises(DataPlaneUnavailable, match="for good"):
            await ledger.reserve("b")
        assert not ledger.gate.is_open

    on_a_plane(check)


def test_a_group_is_reserved_once() -> None:
    """By one ledger or by two: the second one is told, and no place is lost by it."""

    async def check(client: Client) -> None:
        ledger, other = CapacityLedger(client, "p", 2), CapacityLedger(client, "p", 2)
        await ledger.reserve("a", owner="w1")
        with pytest.raises(DataPlaneBadRequest, match="'a' has a place already"):
            await ledger.reserve("a")
        with pytest.raises(DataPlaneBadRequest, match="reservation:a"):
            await other.reserve("a")
        assert (ledger.used, other.used) == (1, 0)

    on_a_plane(check)


def test_a_restarted_controller_counts_what_is_in_flight_and_what_is_there() -> None:
    """It neither dispatches more than fits nor waits for places that nobody takes."""

    async def check(client: Client) -> None:
        first = CapacityLedger(client, "p", 4)
        await first.reserve("a")
        await first.reserve("b")
        await put_group(client, "c")
        await put_group(client, "b")  # its reservation is not needed any more
        again = CapacityLedger(client, "p", 4)
        listing = await again.rebuild()
        assert (again.used, again.reserved, again.free) == (3, ["a"], 1)
        assert list(listing.reservations) == ["a"]
        assert reservation_id("b") not in await rows(client)
        await again.reserve("d")
        assert await again.try_reserve("e") is None

    on_a_plane(check)


def test_a_reservation_ages_out() -> None:
    """An old reservation is removed after its timeout, by a new ledger as by the first one; younger ones stay."""

    async def check(client: Client) -> None:
        ledger = CapacityLedger(client, "p", 2, reservation_timeout_s=60.0)
        await ledger.reserve("a")
        await anyio.sleep(40.0)
        await ledger.reserve("b")
        await ledger.rebuild()
        assert ledger.reserved == ["a", "b"]
        await anyio.sleep(30.0)
        fresh = CapacityLedger(client, "p", 2, reservation_timeout_s=60.0)
        for one in (fresh, ledger):
            await one.rebuild()
            assert (one.reserved, one.free) == (["b"], 1)
        assert await rows(client) == {reservation_id("b")}

    on_a_plane(check)


def test_a_reservation_from_a_clock_that_is_ahead_ages_out_too() -> None:
    """By the time since it was first listed here."""

    async def check(client: Client) -> None:
        tags = {"group_id": "reservation:a", "reservation_for": "a", "reservation_token": "t", "committed": False}
        await client.put_samples(["reservation:a"], "p", tags=[{**tags, "created_at": 4e9, "expected_num_keys": 1}])
        ledger = CapacityLedger(client, "p", 2, reservation_timeout_s=60.0)
        await ledger.rebuild()
        await anyio.sleep(59.0)
        await ledger.rebuild()
        assert ledger.reserved == ["a"]
        await anyio.sleep(2.0)
        await ledger.rebuild()
        assert ledger.reserved == []

    on_a_plane(check)


def test_reservations_of_owners_that_are_gone_are_removed() -> None:
    """Each owner is asked about once in a listing."""

    async def check(client: Client) -> None:
        ledger = CapacityLedger(client, "p", 5)
        for name, owner in (("a", "dead"), ("b", "dead"), ("c", "alive")):
            await ledger.reserve(name, owner=owner)
        await ledger.reserve("d")
        await ledger.reserve("e")
        await put_group(client, "e")  # its reservation ends as well
        asked = []

        async def gone(owner: str) -> bool:
            asked.append(owner)
            return owner == "dead"

        listing = await ledger.rebuild(gone=gone)
        assert sorted(asked) == sorted(["alive", client.owner, "dead"])
        assert (sorted(listing.reservations), sorted(ledger.reserved)) == (["c", "d"], ["c", "d"])
        assert await rows(client) == {reservation_id("c"), reservation_id("d"), "e_g0", "e_g1"}

    on_a_plane(check)


def test_a_removal_spares_a_reservation_that_was_made_since() -> None:
    """3a: released late, a reservation does not take the next one of the same group with it."""

    async def check(client: Client) -> None:
        ledger = CapacityLedger(client, "p", 2)
        old = await ledger.reserve("a")
        await ledger.release(old)
        await ledger.reserve("a")
        await ledger.client.clear_samples(old.meta, "p")
        assert await rows(client) == {reservation_id("a")}
        await ledger.commit(old)  # may be repeated
        assert await rows(client) == {reservation_id("a")}

    on_a_plane(check)


@pytest.mark.parametrize("arrives", [False, True])
def test_a_reservation_without_an_answer_is_found_out_about(arrives: bool) -> None:  # noqa: FBT001
    """Lost on the way or answered to nobody: the place comes back with the next listing, and no row stays."""
    plan = FaultPlan().on("put_samples")
    plan = plan.lose_reply(for_s=50.0) if arrives else plan.lose_request(for_s=50.0)

    async def check(client: Client) -> None:
        ledger = CapacityLedger(client, "p", 1)
        with pytest.raises(DataPlaneError) as raised:
            await ledger.reserve("a")
        assert raised.value.ambiguous
        assert ledger.used == 1
        await anyio.sleep(100.0)
        place = await ledger.reserve("a")  # whoever tries again is served
        assert (await client.list_metadata("p"))[0].tags[0]["reservation_token"] == place.token
        await ledger.release(place)
        assert (ledger.used, await rows(client)) == (0, set())

    on_a_plane(check, plan)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cancelled_reservation_takes_no_place(backend: str) -> None:
    """Cancelled at any moment of its put, it is gone after the next listing."""

    async def check(client: Client) -> None:
        ledger = CapacityLedger(client, "p", 3)
        for step in range(30):
            with anyio.move_on_after(0.1 * step):
                await ledger.reserve(f"g{step}")
                await anyio.sleep(9.0)
            assert len(ledger.reserved) <= 1
            if f"g{step}" in ledger.reserved:
                listed = {g.tags[0]["reservation_for"]: g for g in await client.list_metadata("p")}
                if f"g{step}" in listed:
                    await client.clear_samples(listed[f"g{step}"], "p")
            await ledger.rebuild()
            assert (ledger.used, await rows(client)) == (0, set())

    on_a_plane(check, FaultPlan(seed=5).on("put_samples").delay(p50_s=0.3, p99_s=2.0), backend)


def test_a_reservation_that_is_refused_takes_no_place() -> None:
    """A partition that is not there is the caller's mistake, at once."""

    async def check(client: Client) -> None:
        ledger = CapacityLedger(client, "q", 1)
        with pytest.raises(DataPlaneBadRequest):
            await ledger.reserve("a")
        assert (ledger.used, ledger.free, ledger.progress) == (0, 1, 0)

    on_a_plane(check)


def test_a_backend_that_cannot_bind_removals_is_refused() -> None:
    """A removal that might hit another life is never made; the capability is named."""

    class Bare:
        """Verbs of somebody else's client."""

        def get_capabilities(self) -> Any:
            """Promise nothing."""
            from asyncdp import DataPlaneCapabilities

            return DataPlaneCapabilities()

    with pytest.raises(DataPlaneUnsupported) as raised:
        CapacityLedger(Bare(), "p", 1)  # type: ignore[arg-type]
    assert raised.value.capability == "bound_mutations"


@pytest.mark.parametrize(("at_once", "sizes"), [(4, [4, 4, 4, 2]), (5, [6, 6, 2]), (14, [14]), (100, [14])])
def test_rows_are_removed_in_batches_of_whole_groups(
    at_once: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each group once, in order; a batch is over with the group that fills it."""
    monkeypatch.setattr(ledger_module, "ROWS_AT_ONCE", at_once)

    async def check(client: Client) -> None:
        for name in range(7):
            await put_group(client, str(name))
        listed = await client.list_metadata("p")
        batches = ledger_module.removed_together(listed)
        assert [one.size for one in batches] == sizes
        assert [one for batch in batches for one in batch.sample_ids] == [key for one in listed for key in one.keys]
        assert ledger_module.removed_together([]) == []

    on_a_plane(check)


def test_its_defaults_are_those_of_the_page() -> None:
    """docs/recovery.md names the seconds."""
    defaults = {name: one.default for name, one in inspect.signature(CapacityLedger).parameters.items()}
    assert (defaults["reservation_timeout_s"], defaults["relist_s"]) == (1800.0, 1.0)


def test_a_reservation_says_who_has_what() -> None:
    """Its owner is the client unless one is named; a client of somebody else's may have no name."""

    async def check(client: Client) -> None:
        ledger = CapacityLedger(client, "p", 3)
        named = await ledger.reserve("a", owner="w", weight_version=4)
        assert (named.group_id, named.owner, named.weight_version, named.meta.size) == ("a", "w", 4, 1)
        assert (await ledger.reserve("b")).owner == client.owner
        assert (await CapacityLedger(Other(client), "p", 3).reserve("c")).owner == ""  # type: ignore[arg-type]

    on_a_plane(check)


def test_commit_and_release_remove_one_reservation_only() -> None:
    """The group, and what else this client has put, stay."""

    async def check(client: Client) -> None:
        ledger = CapacityLedger(client, "p", 3)
        places = [await ledger.reserve(name) for name in "abc"]
        await put_group(client, "a")
        await ledger.commit(places[0])
        assert await rows(client) == {"a_g0", "a_g1", reservation_id("b"), reservation_id("c")}
        assert (ledger.used, ledger.reserved) == (3, ["b", "c"])
        await ledger.release(places[1])
        assert await rows(client) == {"a_g0", "a_g1", reservation_id("c")}
        assert (ledger.used, ledger.reserved) == (2, ["c"])

    on_a_plane(check)


def test_a_reservation_that_was_cancelled_after_its_put_is_removed() -> None:
    """By the next listing, which knows it by its token; one that was made since for the same group stays."""

    async def check(client: Client) -> None:
        class Late(Other):
            """Its answers to puts come late."""

            async def put_samples(self, *args: Any, **kwargs: Any) -> Any:
                """Put, and answer after nine seconds."""
                meta = await client.put_samples(*args, **kwargs)
                await anyio.sleep(9.0)
                return meta

        ledger = CapacityLedger(Late(client), "p", 1)  # type: ignore[arg-type]
        for since in (False, True):
            with anyio.move_on_after(1.0):
                await ledger.reserve("a")
            assert (await rows(client), ledger.used) == ({reservation_id("a")}, 1)
            if since:
                await client.clear_samples((await client.list_metadata("p"))[0].meta(), "p")
                await CapacityLedger(client, "p", 1).reserve("a")
            await ledger.rebuild()
            assert (await rows(client), ledger.used) == ({reservation_id("a")} if since else set(), int(since))

    on_a_plane(check)


STEPS = st.lists(
    st.sampled_from(["reserve", "reserve", "work", "fail", "vanish", "pop", "restart", "list", "pause", "other"]),
    max_size=25,
)
TIMEOUT_S = 100.0


class History:
    """A controller with its workers and a trainer. What the plane holds is asked by a client that meets no fault."""

    def __init__(self, client: Client, truth: Client, rng: random.Random, capacity: int) -> None:
        self.client, self.truth, self.rng, self.capacity = client, truth, rng, capacity
        self.working: list[tuple[Reservation, float]] = []
        self.made = 0
        self.ledger = CapacityLedger(client, "p", capacity, reservation_timeout_s=TIMEOUT_S)

    async def there(self) -> set[str]:
        """Return the groups that are being made or are in the plane."""
        return {g.tags[0].get("reservation_for", g.group_id) for g in await self.truth.list_metadata("p")}

    async def known(self) -> None:
        """Let the ledger list until it has."""
        while True:
            with suppress(DataPlaneError):
                await self.ledger.rebuild()
                return
            await anyio.sleep(1.0)

    async def reserve(self) -> None:
        """Whatever is granted fits, by what is truly there."""
        self.made += 1
        place = await self.ledger.try_reserve(f"r{self.made}")
        if place is None:
            assert self.ledger.free == 0
            return
        self.working.append((place, anyio.current_time()))
        assert len(await self.there()) <= self.capacity

    async def work(self, *, fails: bool = False) -> None:
        """A worker delivers, or says that it cannot, unless its time is over."""
        if not self.working:
            return
        place, since = self.working.pop(self.rng.randrange(len(self.working)))
        if anyio.current_time() - since > TIMEOUT_S / 2:
            return
        if fails:
            await self.ledger.release(place)
            return
        name, ledger = place.group_id, self.rng.choice([self.ledger, None])
        async with GroupWriter(
            self.client, "p", name, size=2, weight_version=1, reservation=place, ledger=ledger
        ) as group:
            await group.put([f"{name}_g0"], {"x": torch.zeros(1)})
            await group.put([f"{name}_g1"], {"x": torch.zeros(1)})

    async def fail(self) -> None:
        """See work."""
        await self.work(fails=True)

    async def vanish(self) -> None:
        """A worker dies."""
        if self.working:
            self.working.pop()

    async def pop(self) -> None:
        """A trainer removes a group, in this process or in another one."""
        whole = [g for g in await self.client.list_metadata("p") if g.committed and g.is_complete]
        if whole:
            await self.client.pop(whole[0], "p")
            if self.rng.random() < 0.5:
                self.ledger.freed([whole[0].group_id])

    async def restart(self) -> None:
        """The controller is killed and started again."""
        self.ledger = CapacityLedger(self.client, "p", self.capacity, reservation_timeout_s=TIMEOUT_S)
        await self.known()

    async def list(self) -> None:
        """The controller looks."""
        await self.ledger.rebuild()

    async def pause(self) -> None:
        """Time passes."""
        await anyio.sleep(self.rng.choice([1.0, 30.0, 200.0]))

    async def other(self) -> None:
        """A producer that knows no ledger puts a group, and the controller looks."""
        self.made += 1
        await put_group(self.truth, f"o{self.made}")
        await self.known()

    async def play(self, steps: Sequence[str]) -> None:
        """Play; faults are expected, mistakes are not. In the end all places are free, and no row is left."""
        for step in steps:
            try:
                await getattr(self, step)()
            except DataPlaneBadRequest:
                raise
            except DataPlaneError:
                continue
        await anyio.sleep(2 * TIMEOUT_S)
        for one in await self.truth.list_metadata("p"):
            if "reservation_for" not in one.tags[0]:
                await self.truth.evict(one, "p")
        await self.known()
        assert (self.ledger.used, self.ledger.free, await rows(self.truth)) == (0, self.capacity, set())


def play(steps: Sequence[str], seed: int, capacity: int, *, faults: bool) -> None:
    """Play one history, with or without a plan of faults that end in time."""
    plan = FaultPlan(seed=seed)
    if faults:
        plan = plan.refuse(p=0.1, for_s=150.0).lose_reply(p=0.1, for_s=150.0).lose_request(p=0.05, for_s=150.0)

    async def run() -> None:
        transport = MemoryTransport()
        truth = stack(MemoryTransport(transport.attach_config(), bootstrap=False))
        async with faulty_stack(transport, plan, attempt_timeout_s=1.0, max_attempts=2) as client, truth:
            client.env.clock.time()
            await truth.register_partition("p", ["x"], 8, ["train"], grpo_group_size=2)
            await History(client, truth, random.Random(seed), capacity).play(steps)

    run_virtual(run)


@settings(max_examples=25, phases=PHASES)
@given(steps=STEPS, seed=st.integers(0, 2**16), capacity=st.integers(1, 3), faults=st.booleans())
def test_random_histories_neither_exceed_the_capacity_nor_lose_places(
    steps: list[str],
    seed: int,
    capacity: int,
    faults: bool,  # noqa: FBT001
) -> None:
    """Workers that deliver, fail or vanish, restarts, lost answers: in the end all places are free."""
    play(steps, seed, capacity, faults=faults)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=1000, phases=PHASES)
@given(steps=STEPS, seed=st.integers(0, 2**16), capacity=st.integers(1, 3), faults=st.booleans())
def test_a_thousand_random_histories(steps: list[str], seed: int, capacity: int, faults: bool) -> None:  # noqa: FBT001
    """The same for long."""
    play(steps, seed, capacity, faults=faults)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"capacity": "6"}, "capacity"),
        ({"capacity": 2.5}, "capacity"),
        ({"capacity": True}, "capacity"),
        ({"partition_id": ""}, "partition_id"),
        ({"reservation_timeout_s": "x"}, "reservation_timeout_s"),
        ({"relist_s": 0}, "relist_s"),
    ],
)
def test_arguments_of_a_ledger_are_checked(wrong: dict[str, Any], named: str) -> None:
    """When it is made."""

    async def check(client: Client) -> None:
        with pytest.raises(ValueError, match=rf"\b{named}\b"):
            CapacityLedger(client, **({"partition_id": "p", "capacity": 1} | wrong))

    on_a_plane(check)


def test_arguments_of_a_reservation_are_checked() -> None:
    """At once, though no place is free or the gate is closed."""

    async def check(client: Client) -> None:
        ledger = CapacityLedger(client, "p", 1)
        await ledger.reserve("g")
        for wrong in ("", 3, None, ["a"]):
            with pytest.raises(DataPlaneBadRequest, match="group_id must be a non-empty string"):
                await ledger.reserve(wrong)  # type: ignore[arg-type]
            with pytest.raises(DataPlaneBadRequest, match=r"^group_id must be a non-empty string"):
                await ledger.try_reserve(wrong)  # type: ignore[arg-type]
        ledger.gate.close()
        with anyio.fail_after(60.0), pytest.raises(DataPlaneBadRequest, match="group_id must be a non-empty string"):
            await ledger.reserve("")
        for more in ({"owner": 3}, {"weight_version": "new"}):
            with pytest.raises(DataPlaneBadRequest, match=rf"\b{next(iter(more))}\b"):
                await ledger.try_reserve("h", **more)  # type: ignore[arg-type]

    on_a_plane(check)


def test_progress_is_what_was_made_or_trained() -> None:
    """Groups that became whole since the last listing, and those that were trained on; nothing that was given up."""

    async def check(client: Client) -> None:
        await put_group(client, "before")
        ledger = CapacityLedger(client, "p", 9, reservation_timeout_s=5.0)
        assert ledger.progress == 0
        for _ in range(2):  # what was there before the first listing was not made meanwhile
            await ledger.rebuild()
            assert ledger.progress == 0
        await put_group(client, "a")
        await put_group(client, "b")
        for _ in range(2):  # each counts once
            await ledger.rebuild()
            assert ledger.progress == 2
        ledger.freed(["a", "b"])
        assert ledger.progress == 4
        ledger.freed(["before"], trained=False)
        assert ledger.progress == 4
        await ledger.release(await ledger.reserve("c"))
        await ledger.reserve("d")
        await anyio.sleep(6.0)
        await ledger.rebuild()  # d has aged out
        assert (ledger.reserved, ledger.progress) == ([], 4)
        await put_group(client, "e")
        await ledger.rebuild()
        assert ledger.progress == 5

    on_a_plane(check)
