"""Interleavings of mutations whose replies were lost, claims, capacity, hosts: what the directory promises."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from asyncdp.calls import RegisterPartition
from asyncdp.calls.slots import HostRef, Publish, Resolved, SlotRef
from asyncdp.errors import (
    ClaimLost,
    DataPlaneBadRequest,
    DataPlaneNotReady,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    DataPlaneWriteError,
    SampleNotFound,
    StaleSlotError,
)
from asyncdp.rows.block import FieldSpec

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.directory import Directory, OperationId, Published

pytestmark = pytest.mark.anyio
HOST = HostRef("host", 1, (1,))
_NEXT = iter(range(1, 1 << 30))


def mutation(name: str = "", left_s: float = 10.0) -> "OperationId":
    """Name a mutation."""
    from asyncdp.transports.ucxx.directory import OperationId

    return OperationId(name or f"op{next(_NEXT)}", left_s)


async def put(
    directory: "Directory", ids: list[str], slot: int = 1, *, tags: list[dict[str, Any]] | None = None, **how: Any
) -> "Published":
    """Publish one slot that holds field x of all ids."""
    ref = SlotRef(HOST, slot, 1, ("x",), range(len(ids)), range(len(ids)))
    spec = {"x": FieldSpec("object")}
    named = how.get("op", mutation())
    told = None if tags is None else tuple(tags)
    call = Publish(tuple(ids), how.get("p", "p"), (ref,), told, spec, {"x": (8,) * len(ids)}, **how.get("bound", {}))
    return await directory.publish(named, call, "me")


async def slots(directory: "Directory", ids: list[str]) -> list[int]:
    """Say in which slot each sample lies; 0: it is not there."""
    found = await directory.locate("p", ids, ["x"])
    where = dict.fromkeys(range(len(ids)), 0)
    where.update({row: ref.slot for ref in found.refs for row in ref.rows})
    return list(where.values())


@pytest.fixture
async def plane(directory: "Directory") -> "Directory":
    """A directory with partition p and a host."""
    from asyncdp.transports.ucxx.directory import HostInfo

    await directory.beat(HostInfo(HOST.id, HOST.epoch, ports=HOST.ports, free_bytes=1000))
    await directory.register(RegisterPartition("p", ("x",), 10, ("t", "u")))
    return directory


async def test_a_partition_that_declares_nothing_is_there(plane: "Directory") -> None:
    """Without fields, tasks and number of samples, as that of clients' reports; registered again nothing changes."""
    for _ in range(2):
        await plane.register(RegisterPartition("bare", (), 0, ()))
        assert (await plane.describe("bare")).size == 0
    await put(plane, ["a"], 1, p="bare")
    assert {one.partition_id: one.size for one in await plane.list_partitions()} == {"p": 0, "bare": 1}


# -- replies that were lost


async def test_a_resent_clear_leaves_the_newer_row(plane: "Directory") -> None:
    """A clear's reply is lost, another put is acknowledged, the clear comes again: the new row lives."""
    await put(plane, ["a"], 1)
    first = await plane.clear(mutation("clear"), "p", ["a"])
    await put(plane, ["a"], 2)
    assert await plane.clear(mutation("clear"), "p", ["a"]) == first
    assert first.freed[0].slot.slot == 1
    assert await slots(plane, ["a"]) == [2]


async def test_a_resent_put_leaves_the_newer_value(plane: "Directory") -> None:
    """A put's reply is lost, a newer put is acknowledged, the old one comes again: the newer value stays."""
    first = await put(plane, ["a"], 1, op=mutation("old"))
    newer = await put(plane, ["a"], 2)
    assert await put(plane, ["a"], 1, op=mutation("old")) == first
    assert await slots(plane, ["a"]) == [2]
    assert [(cells.slot.slot, cells.index, cells.fields) for cells in newer.dead] == [(1, (0,), None)]


async def test_a_resolved_put_never_comes_back(plane: "Directory") -> None:
    """A put is cancelled and resolved, its id cleared; then the abandoned put arrives: refused."""
    assert await plane.resolve("gone", "p") == Resolved("refused")
    await plane.clear(mutation(), "p", ["a"])
    with pytest.raises(DataPlaneWriteError, match="given up"):
        await put(plane, ["a"], 1, op=mutation("gone"))
    assert await slots(plane, ["a"]) == [0]


async def test_a_put_that_arrived_is_done(plane: "Directory") -> None:
    """Resolve of a put that did arrive says so, also where the partition is gone by then."""
    first = await put(plane, ["a"], 1, op=mutation("there"))
    assert await plane.resolve("there", "p") == Resolved("done")
    await plane.drop(mutation(), "p")
    assert await put(plane, ["a"], 1, op=mutation("there")) == first
    assert await plane.resolve("there", "p", age_s=1e4) == Resolved("done")
    assert await plane.resolve("unknown", "p", age_s=1e4) == Resolved("forgotten")


async def test_what_comes_after_its_deadline_is_refused(plane: "Directory") -> None:
    """A mutation whose call is over by the server's clock changes nothing, and is not remembered."""
    with pytest.raises(DataPlaneTimeout, match="after its deadline"):
        await put(plane, ["a"], 1, op=mutation("late", -1.0))
    with pytest.raises(DataPlaneTimeout):
        await plane.claim(mutation("late claim", -1.0), "p", "t", ["x"], 1, 1, "me")
    assert await slots(plane, ["a"]) == [0]
    assert await plane.resolve("late", "p") == Resolved("refused")


async def test_a_repeated_claim_is_the_same_batch(plane: "Directory") -> None:
    """A claim's reply is lost: asked again it is the same batch, and the next claim gets others."""
    await put(plane, [f"s{i}" for i in range(6)])
    first = await plane.claim(mutation("c"), "p", "t", ["x"], 4, 4, "me")
    assert await plane.claim(mutation("c"), "p", "t", ["x"], 4, 4, "me") == first
    assert first.meta.sample_ids == ["s0", "s1", "s2", "s3"]
    assert (await plane.claim(mutation(), "p", "t", ["x"], 4, 1, "me")).meta.sample_ids == ["s4", "s5"]
    assert (await plane.claim(mutation(), "p", "u", ["x"], 9, 1, "me")).meta.size == 6


async def test_an_ended_claim_takes_nothing_more(plane: "Directory") -> None:
    """A claim that was released, abandoned or emptied is refused when its request arrives once more."""
    await put(plane, ["a", "b", "c", "d"])
    for name, end in (
        ("released", lambda ids: plane.release(mutation(), "p", ids, ["released"] * len(ids), "t")),
        ("abandoned", lambda _: plane.abandon("p", "abandoned")),
        ("popped", lambda ids: plane.clear(mutation(), "p", ids)),
    ):
        got = await plane.claim(mutation(name), "p", "t", ["x"], 2, 1, "me")
        await end(got.meta.sample_ids)
        with pytest.raises(DataPlaneWriteError):
            await plane.claim(mutation(name), "p", "t", ["x"], 2, 1, "me")
    await plane.abandon("p", "never arrived")
    with pytest.raises(DataPlaneWriteError):
        await plane.claim(mutation("never arrived"), "p", "t", ["x"], 2, 1, "me")
    assert await plane.list_claims("p", "t") == []


async def test_clearing_all_of_an_owner_spares_what_lives_anew(
    plane: "Directory", monkeypatch: pytest.MonkeyPatch
) -> None:
    """While an owner's samples are looked up, one is cleared and put anew by another: that one stays."""
    await put(plane, ["a", "b"])
    looked_up = plane._owned

    async def slowly(partition_id: str, owner: str) -> Any:
        found = await looked_up(partition_id, owner)
        await plane.clear(mutation(), "p", ["a"])
        await put(plane, ["a"], 2)
        return found

    monkeypatch.setattr(plane, "_owned", slowly)
    assert (await plane.clear(mutation(), "p", None, "me")).count == 1
    assert await slots(plane, ["a", "b"]) == [2, 0]


# -- claims


async def test_a_lease_that_is_over_is_lost(plane: "Directory") -> None:
    """A consumer outlives its lease and another claims: the first may neither release nor pop."""
    await put(plane, ["a"])
    first = await plane.claim(mutation("first"), "p", "t", ["x"], 1, 1, "slow", lease_s=0.02)
    again = await plane.claim(mutation("second"), "p", "t", ["x"], 1, 1, "quick", wait_s=60.0)
    assert first.meta.sample_ids == again.meta.sample_ids == ["a"]
    with pytest.raises(ClaimLost, match="'a' is not claimed"):
        await plane.release(mutation(), "p", ["a"], ["first"], "t")
    with pytest.raises(ClaimLost):
        await plane.clear(mutation(), "p", ["a"], "", [("first",)])
    assert (await plane.clear(mutation(), "p", ["a"], "", [("second",)])).count == 1
    with pytest.raises(ClaimLost):  # gone, but as the other's
        await plane.clear(mutation(), "p", ["a"], "", [("first",)])


async def test_claimable_again_only_after_a_clear(plane: "Directory") -> None:
    """A claimed sample that is put again is not claimable again; cleared and put again it is, as another one."""
    await put(plane, ["a"], 1)
    meta = (await plane.claim(mutation(), "p", "t", ["x"], 1, 1, "me")).meta
    await put(plane, ["a"], 2)
    assert (await plane.claim(mutation(), "p", "t", ["x"], 1, 1, "me")).meta.size == 0
    await plane.clear(mutation(), "p", ["a"])
    await put(plane, ["a"], 3)
    anew = (await plane.claim(mutation(), "p", "t", ["x"], 1, 1, "me")).meta
    assert anew.sample_ids == ["a"]
    assert meta.handles is not None
    assert anew.handles is not None
    old = await plane.locate("p", ["a"], ["x"], meta.handles)
    assert isinstance(old.missing[0], StaleSlotError)
    assert not (await plane.locate("p", ["a"], ["x"], anew.handles)).missing


async def test_whole_groups_in_the_order_in_which_they_became_whole(plane: "Directory") -> None:
    """With grpo_group_size only whole groups are claimed, the one that was whole first before the others."""
    await plane.register(RegisterPartition("p", (), 0, (), 2))
    await put(plane, ["a_g0", "b_g0"])
    await put(plane, ["b_g1"])
    await put(plane, ["a_g1", "c_g0"])
    with pytest.raises(DataPlaneBadRequest, match="below one group of 2"):
        await plane.claim(mutation(), "p", "t", ["x"], 1, 1, "me")
    got = await plane.claim(mutation(), "p", "t", ["x"], 3, 3, "me")
    assert got.meta.sample_ids == ["b_g0", "b_g1"]
    assert (await plane.claim(mutation(), "p", "t", ["x"], 4, 1, "me")).meta.sample_ids == ["a_g0", "a_g1"]
    with pytest.raises(DataPlaneBadRequest, match="group 'a' would have 3 rows"):
        await put(plane, ["a_g2"])


@pytest.mark.parametrize("when", ["before", "after"])
async def test_rows_of_a_group_come_in_the_order_of_their_age(plane: "Directory", when: str) -> None:
    """Also the row that joined its group later than a younger one, before whole groups were declared or after."""
    if when == "before":
        await plane.register(RegisterPartition("p", (), 0, (), 2))
    await put(plane, ["old"], 1)
    await put(plane, ["new"], 2, tags=[{"group_id": "G"}])
    await put(plane, ["old"], 3, tags=[{"group_id": "G"}])
    await plane.register(RegisterPartition("p", (), 0, (), 2))
    assert (await plane.claim(mutation(), "p", "t", ["x"], 2, 2, "me")).meta.sample_ids == ["old", "new"]


async def test_a_row_joins_a_group_that_has_the_name_of_a_new_row_elsewhere(plane: "Directory") -> None:
    """One put makes a row that is told another group, and moves a row into the group of that row's name."""
    await put(plane, ["old"], 1)
    await put(plane, ["new", "old"], 2, tags=[{"group_id": "G"}, {"group_id": "new"}])
    assert {group.group_id: group.keys for group in await plane.list_metadata("p")} == {"G": ("new",), "new": ("old",)}
    assert await plane.depth("p") == 2


async def test_who_waits_for_the_rest_of_a_group_is_named(plane: "Directory") -> None:
    """As long as the group is not whole, and again when it is not whole any more; never while it is ready."""
    await plane.register(RegisterPartition("p", ("x",), 10, (), 2))

    async def waiting() -> tuple[int, tuple[str, ...]]:
        seen = await plane.claim(mutation(), "p", "t", ["x"], 8, 8, "me")
        return seen.ready, seen.waiting_ids

    await put(plane, ["a_g0"], 1)
    assert await waiting() == (0, ("a_g0",))
    await put(plane, ["a_g1"], 2)
    await put(plane, ["b_g0"], 3)
    assert await waiting() == (2, ("b_g0",))
    await plane.clear(mutation(), "p", ["a_g0"])
    assert await waiting() == (0, ("a_g1", "b_g0"))
    await put(plane, ["b_g1"], 4)
    got = await plane.claim(mutation("c"), "p", "t", ["x"], 2, 2, "me")
    assert await waiting() == (0, ("a_g1",))
    await plane.release(mutation(), "p", got.meta.sample_ids[:1], ["c"], "t")
    assert await waiting() == (0, ("a_g1", got.meta.sample_ids[0]))


async def test_a_waiting_claim_is_woken_by_a_put(connect: Callable[..., "Directory"], plane: "Directory") -> None:
    """A claim that waits returns when another client publishes, long before it would look again by itself."""
    waiter = connect(wake_s=300.0)
    got: list[Any] = []

    async def wait() -> None:
        got.append(await waiter.claim(mutation(), "p", "t", ["x"], 2, 2, "me", wait_s=300.0))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.sleep(0.05)
            await put(plane, ["a"])
            await anyio.sleep(0.05)
            assert not got
            await put(plane, ["b"])
    assert got[0].meta.sample_ids == ["a", "b"]
    nothing = await waiter.claim(mutation(), "p", "t", ["x"], 2, 1, "me", wait_s=0.05)
    assert nothing.meta.size == 0


async def test_every_sample_once(connect: Callable[..., "Directory"], plane: "Directory") -> None:
    """Eight claimers on their own connections get each of 1000 samples exactly once."""
    for start in range(0, 1000, 100):
        await put(plane, [f"s{i}" for i in range(start, start + 100)])
    seen: list[str] = []

    async def take(client: "Directory") -> None:
        while True:
            meta = (await client.claim(mutation(), "p", "t", ["x"], 7, 1, "me")).meta
            if not meta.size:
                return
            seen.extend(meta.sample_ids)

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(take, connect())
    assert sorted(seen) == sorted(f"s{i}" for i in range(1000))
    assert await plane.consumed("p", ["t"])
    assert not await plane.consumed("p", ["t", "u"])


async def test_waiting_for_a_partition(connect: Callable[..., "Directory"]) -> None:
    """Who waits for a partition is woken by its registration."""
    waiter, other = connect(wake_s=300.0), connect()
    assert not await waiter.exists("p", 0.02)

    async def register() -> None:
        await anyio.sleep(0.05)
        await other.register(RegisterPartition("p", (), 1, ()))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(register)
            assert await waiter.exists("p", 300.0)


async def test_an_index_that_is_built_while_others_write(
    connect: Callable[..., "Directory"], plane: "Directory"
) -> None:
    """A first claim indexes a large partition in pages; puts and clears in between are neither lost nor doubled."""
    await plane.register(RegisterPartition("p", (), 0, (), 2))
    for at in range(0, 5000, 500):
        await put(plane, [f"{i // 2}_g{i % 2}" for i in range(at, at + 500)])
    other = connect()
    got: list[str] = []

    async def claim() -> None:
        for _ in range(15):
            got.extend((await plane.claim(mutation(), "p", "t", ["x"], 200, 1, "me")).meta.sample_ids)

    async def write() -> None:
        for i in range(20):
            await put(other, [f"new{i}_g0", f"new{i}_g1"])
            await other.clear(mutation(), "p", [f"{2499 - i}_g0"])

    async with anyio.create_task_group() as group:
        group.start_soon(claim)
        group.start_soon(write)
    got.extend((await plane.claim(mutation(), "p", "t", ["x"], 9999, 1, "me")).meta.sample_ids)
    groups = [f"{i}" for i in range(2480)] + [f"new{i}" for i in range(20)]
    assert len(got) == len(set(got))
    assert {f"{name}_g{i}" for name in groups for i in range(2)} <= set(got)
    assert got[:200] == [f"{i // 2}_g{i % 2}" for i in range(200)]


async def test_a_new_index_notes_shelves_not_rows(plane: "Directory", namespace: str) -> None:
    """What a new index has yet to see is noted by shelves: to note a million rows would hold up all others."""
    from asyncdp.transports.ucxx.directory.encoding.msgpack_codec import pack
    from asyncdp.transports.ucxx.directory.requests.base import INDEXING

    await put(plane, [f"{at}" for at in range(4000)])
    schema = await plane._fetch("p")
    payload = pack((1, (1,), 10, 1, "me", False, ("x",), False))
    assert (await plane._send("claim", "p", payload, schema.version, mutation()))[0] == INDEXING
    key = f"{namespace}:{{p}}:"
    left, shelves = [await plane._link.command("ZRANGE", key + name, 0, -1) for name in ("b:1", "s")]
    assert left == shelves[2:]
    assert (await plane.claim(mutation(), "p", "t", ["x"], 4000, 4000, "me")).meta.size == 4000


# -- what is refused


async def test_a_typo_is_told_at_once(plane: "Directory") -> None:
    """An unknown partition, task or required field is DataPlaneBadRequest; a field in a get may yet be produced."""
    await put(plane, ["a"])
    for args in (("nope", "t", ["x"]), ("p", "nope", ["x"]), ("p", "t", ["nope"])):
        with pytest.raises(DataPlaneBadRequest, match="nope"):
            await plane.claim(mutation(), *args, 1, 1, "me")
    found = await plane.locate("p", ["a"], ["nope"])
    assert isinstance(found.missing[0], SampleNotFound)


async def test_a_full_plane_takes_nothing_of_a_put(connect: Callable[..., "Directory"], plane: "Directory") -> None:
    """The capacity counts the samples of all partitions; a put beyond it leaves nothing behind."""
    small = connect(capacity=3, capacity_age_s=0.0)
    await small.register(RegisterPartition("q", ("x",), 10, ("t",)))
    await put(plane, ["a", "b"], p="q")
    await put(small, ["c"])
    with pytest.raises(DataPlaneNotReady, match="holds 3 of at most 3 samples; 1 more"):
        await put(small, ["d", "c"])
    with pytest.raises(DataPlaneNotReady):
        await small.place("p", ["d"], ["x"])
    assert await slots(small, ["c", "d"]) == [1, 0]
    await put(small, ["c"], 2)  # nothing new in it


async def test_a_partition_that_a_put_declares(connect: Callable[..., "Directory"]) -> None:
    """With auto_register a put into an unknown partition declares it."""
    auto = connect(auto_register=True)
    assert (await auto.place("fresh", ["a"], ["x"])).new == 1
    await put(auto, ["a"], p="fresh")
    info = await auto.describe("fresh")
    assert (info.size, info.size_bytes, info.fields) == (1, 8, {"x": "object"})
    assert [part.partition_id for part in await auto.list_partitions()] == ["fresh"]


async def test_strict_schema(connect: Callable[..., "Directory"], plane: "Directory") -> None:
    """With strict_schema an undeclared field is refused at place and at publish."""
    strict = connect(strict_schema=True)
    await plane.register(RegisterPartition("s", ("y",), 1, ()))
    with pytest.raises(DataPlaneBadRequest, match="'x' is not declared"):
        await strict.place("s", ["a"], ["x"])
    with pytest.raises(DataPlaneBadRequest, match="'x' is not declared"):
        await put(strict, ["a"], p="s")


async def test_two_clients_that_widen_one_schema_at_once(connect: Callable[..., "Directory"]) -> None:
    """Fields that several clients bring at the same time are all there, each under one number."""
    clients = [connect() for _ in range(4)]
    await clients[0].register(RegisterPartition("p", (), 1, ("t",)))

    async def widen(client: "Directory", name: str) -> None:
        for i in range(10):
            ref = SlotRef(HOST, 1, 1, (f"{name}{i}",), [0], [0])
            spec = {f"{name}{i}": FieldSpec("object")}
            await client.publish(mutation(), Publish((name,), "p", (ref,), None, spec), "me")

    async with anyio.create_task_group() as group:
        for at, client in enumerate(clients):
            group.start_soon(widen, client, "abcd"[at])
    info = await clients[0].describe("p")
    assert set(info.fields) == {f"{name}{i}" for name in "abcd" for i in range(10)}
    for name in "abcd":
        found = await clients[1].locate("p", [name], [f"{name}{i}" for i in range(10)])
        assert not found.missing


async def test_tags_that_are_large_or_many(plane: "Directory") -> None:
    """A group of which 2**63 rows are expected is not complete; a row has more tags than two bytes can count."""
    many = [{f"k{at}": at for at in range(66_000)}, {"expected_num_keys": 2**63}]
    for _ in range(2):
        await put(plane, ["a", "b"], tags=many)
    assert await plane.depth("p") == 1
    metas = {meta.group_id: meta for meta in await plane.list_metadata("p")}
    assert many[0].items() <= metas["a"].tags[0].items()
    assert (await put(plane, ["c"], tags=[{"n": 2**64 - 1}])).created == (True,)


@pytest.mark.slow
async def test_ten_thousand_ids_in_one_call(plane: "Directory") -> None:
    """Calls of 10,001 ids, long and with any characters, work as small ones do; a listing comes in pages."""
    from asyncdp.transports.ucxx.directory import HostInfo

    ids = [f"{i} ü\udc80 {'x' * (i % 1000)}" for i in range(10_001)]
    await put(plane, ids, tags=[{"k": i, "f": float(i)} for i in range(len(ids))])
    found = await plane.locate("p", ids, ["x"])
    assert not found.missing
    (ref,) = found.refs
    assert list(ref.index) == list(range(len(ids)))
    metas = await plane.list_metadata("p")
    assert [meta.keys[0] for meta in metas] == ids
    assert [type(meta.tags[0]["f"]) for meta in metas[:3]] == [float] * 3
    claimed = await plane.claim(mutation("all"), "p", "t", ["x"], 20_000, 10_001, "me")
    assert claimed.meta.sample_ids == ids
    await plane.beat(HostInfo(HOST.id, HOST.epoch, ports=HOST.ports))  # all of that may take long on a busy machine
    assert await plane.depth("p") == len(ids)
    await plane.release(mutation(), "p", ids, ["all"] * len(ids), "t")
    assert (await plane.clear(mutation(), "p", ids)).freed[0].index == tuple(range(len(ids)))
    assert (await plane.describe("p")).size == 0


async def test_nothing_is_left_of_a_dropped_partition(plane: "Directory", namespace: str) -> None:
    """After a drop only what remembers outcomes is left, and that expires."""
    await put(plane, ["a", "b"])
    await plane.claim(mutation(), "p", "t", ["x"], 1, 1, "me")
    freed = await plane.drop(mutation(), "p")
    assert [(cells.slot.slot, cells.index) for cells in freed] == [(1, (0, 1))]
    for key in await plane._link.command("KEYS", f"{namespace}:{{p}}:*"):
        assert await plane._link.command("TTL", key) > 0, key
    assert await plane.list_partitions() == []
    with pytest.raises(DataPlaneBadRequest, match="no partition 'p'"):
        await plane.depth("p")


# -- hosts


async def test_hosts_by_load_with_their_space(plane: "Directory") -> None:
    """A placement offers living hosts, the least loaded first, with what they said of themselves."""
    from asyncdp.transports.ucxx.directory import HostInfo

    busy = HostInfo("busy", 1, "10.0.0.1", (7, 8), 5, 9.0, "boot", "arena", draining=False, extra={"lane": True})
    await plane.beat(busy)
    hosts = (await plane.place("p", ["a"], ["x"])).hosts
    assert [host.id for host in hosts] == ["host", "busy"]
    assert hosts[1].words() == busy.words()
    assert hosts[1].ref == HostRef("busy", 1, (7, 8))


async def test_a_host_that_was_replaced_is_told(plane: "Directory") -> None:
    """Of two lives of one host the later one counts; the earlier neither beats nor strikes the other off."""
    from asyncdp.transports.ucxx.directory import HostInfo

    first, second = [await plane.next_epoch("h") for _ in range(2)]
    assert first < second
    await plane.beat(HostInfo("h", second))
    with pytest.raises(DataPlaneUnavailable, match=f"replaced by epoch {second}"):
        await plane.beat(HostInfo("h", first))
    await plane.leave("h", first)
    assert {host.id for host in await plane.hosts()} == {"h", "host"}
    await plane.leave("h", second)
    assert {host.id for host in await plane.hosts()} == {"host"}


async def test_rows_of_a_silent_host_are_lost_keys(connect: Callable[..., "Directory"], plane: "Directory") -> None:
    """Rows on a host that is gone or in another epoch show as lost, and do not count in depth."""
    from asyncdp.transports.ucxx.directory import HostInfo

    await put(plane, ["a"])
    (meta,) = await plane.list_metadata("p")
    assert (meta.lost_keys, await plane.depth("p")) == ((), 1)
    await plane.beat(HostInfo(HOST.id, 2))
    (meta,) = await plane.list_metadata("p")
    assert (meta.lost_keys, await plane.depth("p")) == (("a",), 0)
    found = await plane.locate("p", ["a"], ["x"])
    assert found.refs[0].host.epoch == 1  # the ref of the life that is over: its reader is told so
    quick = connect(host_timeout_s=1e-3, host_forget_s=1e-3)
    await quick.hosts()  # begins the time that the server gives to hosts after a start
    await anyio.sleep(0.01)
    assert [host.alive for host in await quick.hosts()] == [False]
    assert await quick.reap() == ("host",)
    assert await quick.cells_of(HOST.id, 1, ["p"]) == {(1, 1): {0}}
