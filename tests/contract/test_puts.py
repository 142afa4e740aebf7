"""Promise 3: a put is whole or absent; the same ids again replace the same fields; tags merge."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest
import torch

from asyncdp import (
    DataPlaneBadRequest,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneUnavailable,
    DataPlaneWriteError,
    PartialReadError,
    SampleNotFound,
)
from asyncdp.slots import Abort, Place, Reserve, Resolve, WriteSlots
from tests.contract.faults import PUT, Fail, Hold, LoseReply, LoseRequest, Straggle
from tests.contract.rig import at_once, declare, table
from tests.contract.same import check_same

if TYPE_CHECKING:
    from tests.contract.rig import Rig

pytestmark = pytest.mark.anyio


async def tags_of(rig: Rig, sample_id: str) -> dict[str, Any]:
    """Read the tags of one sample."""
    for group in await rig.client.list_metadata("p"):
        if sample_id in group.keys:
            return dict(group.tags[group.keys.index(sample_id)])
    raise AssertionError(sample_id)


async def test_empty_ids_are_a_no_op(rig: Rig) -> None:
    """P0: an empty put and clear change nothing, an empty get is an empty TensorDict."""
    await declare(rig.client)
    meta = await rig.client.put_samples([], "p", table(0, x=torch.zeros(0, 3)), [])
    assert (meta.size, meta.partition_id, meta.sample_ids) == (0, "p", [])
    assert (await rig.client.put_samples([], "p")).size == 0
    got = await rig.client.get_samples([], "p", ["x"])
    assert got.batch_size == torch.Size([0])
    await rig.client.clear_samples([], "p")
    await rig.client.pop([], "p")
    await rig.client.evict([], "p")
    assert (await rig.client.get_data(meta, ["x"])).batch_size == torch.Size([0])
    await rig.client.release_claim(meta)
    assert (await rig.client.describe("p")).size == 0
    assert not (await rig.client.describe("p")).fields["x"]


async def test_a_put_tells_what_it_wrote(rig: Rig) -> None:
    """The meta of a put names ids and fields, has tags and lengths, and reads back what was put."""
    await declare(rig.client, "x", "y")
    tags = [{"input_lengths": 3, "k": "v"}, {"input_lengths": 5}]
    meta = await rig.client.put_samples(["a", "b"], "p", table(x=torch.arange(2), y=torch.ones(2)), tags)
    assert (meta.partition_id, meta.sample_ids, meta.fields) == ("p", ["a", "b"], ["x", "y"])
    assert meta.task_name is None
    assert meta.sequence_lengths == [3, 5]
    assert meta.tags == tags
    check_same((await rig.mate.get_data(meta, ["x"]))["x"], torch.arange(2))
    assert list((await rig.client.get_data(meta)).keys()) == ["x", "y"]


async def test_a_put_again_replaces_the_same_fields_only(rig: Rig) -> None:
    """The other fields and the tags of the ids stay."""
    await declare(rig.client, "x", "y")
    await rig.client.put_samples(["a", "b"], "p", table(x=torch.zeros(2), y=torch.ones(2)), [{"t": 1}, {"t": 2}])
    await rig.mate.put_samples(["b"], "p", {"x": torch.full((1,), 7.0)})
    got = await rig.client.get_samples(["a", "b"], "p", ["x", "y"])
    check_same(got["x"], torch.tensor([0.0, 7.0]))
    check_same(got["y"], torch.ones(2))
    assert (await tags_of(rig, "b"))["t"] == 2
    assert (await rig.client.describe("p")).size == 2


async def test_tags_merge_by_key(rig: Rig) -> None:
    """P7: fields, then tags only, then tags again: fields stay, tags merge."""
    await declare(rig.client)
    await rig.client.put_samples(["a"], "p", {"x": torch.ones(1)}, [{"k": 1, "kept": True}])
    await rig.mate.put_samples(["a"], "p", tags=[{"k": 2, "new": None}])
    await rig.client.put_samples(["a"], "p", tags=[{"other": 1.5}])
    tags = await tags_of(rig, "a")
    assert {k: tags.get(k) for k in ("k", "kept", "new", "other")} == {"k": 2, "kept": True, "new": None, "other": 1.5}
    check_same((await rig.client.get_samples(["a"], "p", ["x"]))["x"], torch.ones(1))


async def test_scalars_of_arrays_become_plain_tags(rig: Rig) -> None:
    """Tags are plain numbers, whatever kind of scalar they were given as."""
    await declare(rig.client)
    await rig.client.put_samples(["a"], "p", tags=[{"t": torch.tensor(3), "n": torch.ones(1).numpy()[0]}])
    tags = await tags_of(rig, "a")
    assert (tags["t"], type(tags["t"]), tags["n"], type(tags["n"])) == (3, int, 1.0, float)


READ_TAGS = ["input_lengths", "weight_version", "created_at", "size_bytes", "expected_num_keys", "committed", "status"]


@pytest.mark.parametrize("value", [None, "many", 2.5, True, -1], ids=repr)
@pytest.mark.parametrize("name", READ_TAGS)
async def test_a_tag_of_an_odd_type_is_refused_or_harmless(rig: Rig, name: str, value: Any) -> None:
    """Tags that the plane itself reads: an odd value is DataPlaneBadRequest by name, or harms no put and no claim."""
    await declare(rig.client)
    odd = {name: value}
    try:
        meta = await rig.client.put_samples(["a", "b"], "p", {"x": torch.zeros(2)}, [odd, {name: 1}])
    except DataPlaneBadRequest as err:
        assert name in err.message  # noqa: PT017 - either is right
        assert (await rig.client.describe("p")).size == 0
        return
    assert meta.size == 2
    assert len(await rig.client.list_metadata("p")) == 2
    claimed = await rig.client.claim_meta("p", "train", ["x"], 2, blocking=False)
    assert sorted(claimed.sample_ids) == ["a", "b"]


async def test_a_put_over_capacity_leaves_nothing(rig: Rig) -> None:
    """P4: over capacity is DataPlaneNotReady; nothing of it is visible, and the space is not lost."""
    client = await rig.open(storage_capacity=4)
    await declare(client)
    await client.put_samples(["a", "b"], "p", {"x": torch.zeros(2)})
    with pytest.raises(DataPlaneNotReady) as caught:
        await client.put_samples(["c", "d", "e"], "p", {"x": torch.ones(3)}, [{}] * 3)
    assert not caught.value.ambiguous
    assert caught.value.retry_after_s is not None
    assert (await client.describe("p")).size == 2
    with pytest.raises(SampleNotFound):
        await client.get_samples(["c"], "p", ["x"])
    assert (await client.claim_meta("p", "train", ["x"], 9, blocking=False)).sample_ids == ["a", "b"]
    with pytest.raises(DataPlaneNotReady):  # a sample of tags only takes a place as well
        await client.put_samples(["c", "d", "e"], "p", tags=[{}] * 3)
    await client.put_samples(["b", "d", "e"], "p", {"x": torch.ones(3)})
    assert (await client.describe("p")).size == 4


async def test_dropping_a_partition_makes_room(rig: Rig) -> None:
    """P4: its samples count no more."""
    client = await rig.open(storage_capacity=2)
    for _ in range(2):
        await declare(client)
        await client.put_samples(["a", "b"], "p", {"x": torch.zeros(2)})
        await client.drop_partition("p")


async def test_space_of_a_writer_that_vanished_comes_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """P12: once its put can be neither finished nor published any more, what it reserved is anybody's."""
    rig.only("memory")
    owner = await rig.open(num_storage_units=1, memory={"slots_per_host": 2, "rows_per_slot": 1})
    late = Straggle(WriteSlots)
    gone = await rig.attach(late, to=owner)
    await declare(owner)
    await late.cut(gone.put_samples(["a", "b"], "p", {"x": torch.zeros(2)}, timeout_s=60))
    for debt in gone.env.ledger:
        gone.env.ledger.paid(debt)  # killed, it settles nothing
    with pytest.raises(DataPlaneNotReady):
        await owner.put_samples(["c"], "p", {"x": torch.zeros(1)})
    clock = rig.transport(owner).plane.clock
    now = clock.time() + 62.0
    monkeypatch.setattr(rig.transport(owner).plane, "clock", SimpleNamespace(time=lambda: now))
    await owner.put_samples(["a", "b"], "p", {"x": torch.ones(2)})
    with pytest.raises(DataPlaneError):
        await late.arrive()
    check_same((await owner.get_samples(["a", "b"], "p", ["x"]))["x"], torch.ones(2))


async def test_full_slots_are_given_back_by_clears(rig: Rig) -> None:
    """P4: where slots run out, a put is DataPlaneNotReady, and a clear makes room."""
    rig.only("memory")
    client = await rig.open(num_storage_units=1, memory={"slots_per_host": 2})
    await declare(client)
    await client.put_samples(["a"], "p", {"x": torch.zeros(1)})
    await client.put_samples(["b"], "p", {"x": torch.zeros(1)})
    for _ in range(3):
        with pytest.raises(DataPlaneNotReady):
            await client.put_samples(["c"], "p", {"x": torch.zeros(1)})
    assert (await client.describe("p")).size == 2
    await client.clear_samples(["a"], "p")
    await client.put_samples(["c"], "p", {"x": torch.ones(1)})
    check_same((await client.get_samples(["c", "b"], "p", ["x"]))["x"], torch.tensor([1.0, 0.0]))


async def test_waiting_puts_go_on_when_there_is_room(rig: Rig) -> None:
    """P4: a put that waits while the plane is full is retried, and ends well once another clears."""
    client = await rig.open(storage_capacity=1)
    mate = await rig.attach(to=client)
    await declare(client)
    await client.put_samples(["a"], "p", {"x": torch.zeros(1)})

    async def clear() -> None:
        await anyio.sleep(0.02)
        await mate.clear_samples(["a"], "p")

    put, _ = await at_once(client.put_samples(["b"], "p", {"x": torch.ones(1)}), clear())
    assert not isinstance(put, Exception)
    check_same((await mate.get_samples(["b"], "p", ["x"]))["x"], torch.ones(1))


@pytest.mark.parametrize("fault", [LoseRequest, LoseReply])
async def test_a_put_whose_answer_is_lost_is_sent_again_and_is_there_once(rig: Rig, fault: Any) -> None:
    """P5: whether the request or the answer was lost, the put ends well and is whole."""
    rig.need("mutation_dedup")
    lost = fault(PUT)
    client = await rig.attach(lost)
    await declare(client)
    await client.put_samples(["a", "b"], "p", {"x": torch.arange(2)}, [{"k": 1}, {"k": 2}])
    assert lost.struck == 1
    check_same((await rig.client.get_samples(["a", "b"], "p", ["x"]))["x"], torch.arange(2))
    assert (await tags_of(rig, "b"))["k"] == 2
    assert (await rig.client.claim_meta("p", "train", ["x"], 5, blocking=False)).sample_ids == ["a", "b"]


@pytest.mark.parametrize(("fault", "rows"), [(LoseRequest, 0), (LoseReply, 2)])
async def test_a_put_that_is_never_answered_is_ambiguous_and_whole_or_absent(rig: Rig, fault: Any, rows: int) -> None:
    """P5: given up, the put says that nobody knows; it is whole or absent, and the next one finds out which."""
    lost = fault(PUT, times=99)
    client = await rig.attach(lost)
    await declare(client)
    with pytest.raises(DataPlaneError) as caught:
        await client.put_samples(["a", "b"], "p", {"x": torch.arange(2)})
    assert caught.value.ambiguous
    assert not caught.value.retryable
    assert caught.value.op == "put_samples"
    assert caught.value.attempts > 1
    assert (await rig.client.describe("p")).size == rows
    lost.times = 0
    await client.put_samples(["b"], "p", {"x": torch.tensor([9])})
    got = await rig.client.get_samples(["b"], "p", ["x"])
    check_same(got["x"], torch.tensor([9]))


@pytest.mark.parametrize("step", [Place, Reserve, WriteSlots, PUT], ids=["place", "reserve", "write", "publish"])
async def test_a_put_that_fails_at_any_step_leaves_nothing(rig: Rig, step: Any) -> None:
    """Whatever step fails for good: nothing is visible, nothing is held, and the put can be made again."""
    rig.need("slot_writes")
    fail = Fail(step, make=lambda: DataPlaneWriteError("disk on fire"), times=99)
    client = await rig.attach(fail)
    await declare(client)
    with pytest.raises(DataPlaneWriteError, match="disk on fire") as caught:
        await client.put_samples(["a", "b"], "p", {"x": torch.zeros(2)}, [{"k": 1}] * 2)
    assert not caught.value.ambiguous
    assert (await rig.client.describe("p")).size == 0
    assert await rig.client.list_metadata("p") == []
    assert not rig.leftovers()
    fail.times = 0
    await client.put_samples(["a", "b"], "p", {"x": torch.zeros(2)})


@pytest.mark.parametrize("step", [Reserve, WriteSlots], ids=["reserve", "write"])
async def test_a_host_that_fails_is_left_for_another(rig: Rig, step: Any) -> None:
    """A put goes to a spare host when the first one answers at no port."""
    rig.need("slot_writes")
    first: list[str] = []

    class Down(Fail):
        async def serve(self, call: Any, ctx: Any, send: Any) -> Any:
            if type(call) in self.kinds:
                first.append(call.host.id)
                if call.host.id != first[0]:
                    return await send(call, ctx)
            return await super().serve(call, ctx, send)

    client = await rig.attach(Down(step, times=99))
    await declare(client)
    await client.put_samples(["a"], "p", {"x": torch.ones(1)})
    assert len(set(first)) == 2
    check_same((await rig.client.get_samples(["a"], "p", ["x"]))["x"], torch.ones(1))
    assert not rig.leftovers()


async def test_a_failed_put_of_one_more_field_keeps_the_others(rig: Rig) -> None:
    """P16: a put of C on existing ids fails and is rolled back; A and B are still there."""
    fail = Fail(PUT, make=lambda: DataPlaneWriteError("refused"), times=0)
    client = await rig.attach(fail)
    await declare(client, "a", "b", "c")
    await client.put_samples(["s", "t"], "p", table(a=torch.zeros(2), b=torch.ones(2)), [{"k": 1}, {"k": 2}])
    fail.times = 99
    with pytest.raises(DataPlaneWriteError):
        await client.put_samples(["s", "t"], "p", {"c": torch.ones(2)}, [{"k": 3}] * 2)
    got = await rig.client.get_samples(["s", "t"], "p", ["a", "b"])
    check_same(got["b"], torch.ones(2))
    with pytest.raises(SampleNotFound):
        await rig.client.get_samples(["s"], "p", ["c"])
    assert (await tags_of(rig, "s"))["k"] == 1


async def test_of_two_writers_at_once_one_whole_row_wins(rig: Rig) -> None:
    """P11: the same id put by two clients at once is one's row, not a mixture."""
    await declare(rig.client, "x", "y")
    for k in range(10):

        def row(value: int) -> Any:
            return table(x=torch.full((1, 4), value), y=torch.full((1,), value))

        results = await at_once(
            *(
                c.put_samples(["s"], "p", row(2 * k + i), [{"v": 2 * k + i}])
                for i, c in enumerate((rig.client, rig.mate))
            )
        )
        assert not [r for r in results if isinstance(r, Exception)]
        got = await rig.client.get_samples(["s"], "p", ["x", "y"])
        value = int(got["y"][0])
        assert value in (2 * k, 2 * k + 1)
        check_same(got["x"], torch.full((1, 4), value))
        assert (await tags_of(rig, "s"))["v"] == value


async def test_puts_of_one_client_at_once_do_not_disturb_each_other(rig: Rig) -> None:
    """Fifty puts at the same time on one client all end well."""
    await declare(rig.client)
    results = await at_once(*(rig.client.put_samples([f"s{i}"], "p", {"x": torch.full((1,), i)}) for i in range(50)))
    assert not [r for r in results if isinstance(r, Exception)]
    got = await rig.client.get_samples([f"s{i}" for i in range(50)], "p", ["x"])
    check_same(got["x"], torch.arange(50))


async def test_a_reader_never_sees_half_a_put(rig: Rig) -> None:
    """A put of 8 rows and 2 fields is there as a whole, at every moment for every reader."""
    await declare(rig.client, "x", "y")
    ids = [f"s{i}" for i in range(8)]
    seen: set[float] = set()

    async def write() -> None:
        for k in range(5):
            await rig.client.put_samples(ids, "p", table(x=torch.full((8,), float(k)), y=torch.full((8, 2), float(k))))

    async def read() -> None:
        while 4.0 not in seen:
            try:
                got = await rig.mate.get_samples(ids, "p", ["x", "y"])
            except SampleNotFound:
                await anyio.lowlevel.checkpoint()
                continue
            per_row = torch.cat([got["x"][:, None], got["y"]], 1)
            assert bool((per_row == per_row[:, :1]).all()), "a row of two puts"
            seen.update(got["x"].tolist())

    wrote, read_ = await at_once(write(), read())
    assert wrote is None
    assert read_ is None


async def test_a_first_put_is_seen_by_nobody_until_it_is_whole(rig: Rig) -> None:
    """Held in mid-put, no row, tag, group or claim of it shows anywhere."""
    hold = Hold(PUT)
    client = await rig.attach(hold)
    await declare(client)

    async def look() -> None:
        await hold.holds()
        try:
            info = await rig.client.describe("p")
            assert (info.size, await rig.client.depth("p"), await rig.client.list_metadata("p")) == (0, 0, [])
            assert not (await rig.client.claim_meta("p", "train", ["x"], 4, blocking=False)).size
            with pytest.raises((SampleNotFound, PartialReadError)):
                await rig.client.get_samples(["a", "b"], "p", ["x"])
        finally:
            hold.go.set()

    put, looked = await at_once(client.put_samples(["a", "b"], "p", {"x": torch.zeros(2)}, [{}, {}]), look())
    assert looked is None
    assert put.size == 2
    assert (await rig.client.depth("p")) == 2


async def test_a_cancelled_put_is_whole_or_absent(rig: Rig) -> None:
    """Cancelled at any moment, a put left all of it or nothing; the next put on these ids finds out and holds."""
    hold = Hold(PUT, times=99)
    client = await rig.attach(hold)
    await declare(client)
    await hold.cut(client.put_samples(["a", "b"], "p", {"x": torch.zeros(2)}))
    assert (await rig.client.describe("p")).size == 0
    hold.go.set()
    await client.put_samples(["b"], "p", {"x": torch.ones(1)})
    assert [g.keys for g in await rig.client.list_metadata("p")] == [("b",)]


@pytest.mark.parametrize("step", [Reserve, WriteSlots, PUT], ids=["reserve", "write", "publish"])
async def test_a_cancelled_put_gives_its_space_back_with_the_next_one(rig: Rig, step: Any) -> None:
    """P15: also when what was on its way arrives later."""
    rig.need("slot_writes", "mutation_dedup")
    late = Straggle(step)
    client = await rig.attach(late)
    await declare(client)
    await late.cut(client.put_samples(["a", "b"], "p", {"x": torch.zeros(2)}))
    await client.put_samples(["c"], "p", {"x": torch.zeros(1)})
    await client.put_samples(["a"], "p", {"x": torch.ones(1)})
    assert not rig.leftovers()
    with pytest.raises(DataPlaneError):
        await late.arrive()
    assert not rig.leftovers()
    assert (await rig.client.describe("p")).size == 2
    check_same((await rig.client.get_samples(["a"], "p", ["x"]))["x"], torch.ones(1))


async def test_a_cancel_while_older_debts_are_settled_leaves_no_slot(rig: Rig) -> None:
    """A put that is cancelled while it waits for an earlier one to be settled gives back what it had reserved."""
    rig.need("mutation_dedup")
    late, hold = Straggle(PUT), Hold(Resolve)
    client = await rig.attach(late, hold)
    await declare(client)
    for fault in (late, hold):
        await fault.cut(client.put_samples(["a"], "p", {"x": torch.zeros(1)}))
    hold.go.set()
    await client.put_samples(["b"], "p", {"x": torch.zeros(1)})
    await client.put_samples(["a"], "p", {"x": torch.zeros(1)})
    assert not rig.leftovers()


async def test_a_host_that_cannot_be_told_to_free_slots_holds_nobody_up(rig: Rig) -> None:
    """What failed puts left on a silent host is told to it once in a while, not before each mutation."""
    rig.need("slot_writes")
    fail, silent = Fail(WriteSlots, times=10_000), Fail(Abort, times=10_000)
    client = await rig.attach(fail, silent)
    await declare(client)
    for i in range(5):
        with pytest.raises(DataPlaneUnavailable):
            await client.put_samples([f"s{i}"], "p", {"x": torch.zeros(1)})
    await client.clear_samples(["a"], "p")
    told = len(silent.seen)
    for _ in range(5):
        await client.clear_samples(["a"], "p")
    assert len(silent.seen) == told
    silent.times = 0
    await client.close()
    assert not rig.leftovers()


async def test_a_writer_that_vanished_in_mid_put_blocks_nobody(rig: Rig) -> None:
    """P12: its ids can be written at once."""
    late = Straggle(PUT)
    client = await rig.attach(late)
    await declare(client)
    await late.cut(client.put_samples(["a"], "p", {"x": torch.zeros(1)}))
    await rig.mate.put_samples(["a"], "p", {"x": torch.ones(1)})
    check_same((await rig.client.get_samples(["a"], "p", ["x"]))["x"], torch.ones(1))


async def test_a_put_that_nobody_can_take_says_so_unambiguously(rig: Rig) -> None:
    """Refused at every port of every host: DataPlaneUnavailable, not a write error; nothing is there."""
    fail = Fail(Reserve, PUT, times=999)
    client = await rig.attach(fail)
    await declare(client)
    with pytest.raises(DataPlaneUnavailable) as caught:
        await client.put_samples(["a"], "p", {"x": torch.zeros(1)})
    assert not caught.value.ambiguous
    assert (await rig.client.describe("p")).size == 0


async def test_a_strict_schema_takes_declared_fields_only(rig: Rig) -> None:
    """Promise 9: undeclared fields are accepted, unless strict_schema."""
    await declare(rig.client)
    await rig.client.put_samples(["a"], "p", {"new": torch.zeros(1)})
    assert (await rig.client.describe("p")).fields["new"] == "float32[]"
    strict = await rig.open(strict_schema=True)
    await declare(strict)
    with pytest.raises(DataPlaneBadRequest, match="'new'") as caught:
        await strict.put_samples(["a"], "p", table(x=torch.zeros(1), new=torch.zeros(1)))
    assert caught.value.field == "new"
    assert (await strict.describe("p")).size == 0
    await strict.put_samples(["a"], "p", {"x": torch.zeros(1)})


async def test_auto_register_is_off_unless_asked_for(rig: Rig) -> None:
    """A put into an unknown partition is DataPlaneBadRequest; with auto_register it declares it."""
    with pytest.raises(DataPlaneBadRequest, match="'q'"):
        await rig.client.put_samples(["a"], "q", {"x": torch.zeros(1)})
    easy = await rig.open(auto_register=True)
    await easy.put_samples(["a"], "q", {"x": torch.zeros(1)})
    assert [info.partition_id for info in await easy.list_partitions()] == ["q"]
