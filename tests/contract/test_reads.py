"""Promises 2 and 6: never fewer rows or columns than asked for; what outlived its data is StaleSlotError."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncdp import (
    CorruptPayload,
    DataPlaneBadRequest,
    DataPlaneError,
    DataPlaneReadError,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    KVBatchMeta,
    Locate,
    PartialReadError,
    ReadSlots,
    SampleNotFound,
    StaleSlotError,
)
from asyncdp.slots import ReadResult
from tests.contract.faults import GET, Fail, Hold, LoseReply, Tamper, Watch
from tests.contract.rig import at_once, declare, table
from tests.contract.same import check_same, rows_of

if TYPE_CHECKING:
    from tests.contract.rig import Rig

pytestmark = pytest.mark.anyio

IDS = [f"s{i}" for i in range(8)]


async def fill(rig: Rig, ids: list[str] = IDS, **more: Any) -> None:
    """Put ``x``, the number of each row, one put per row so that each can fail alone."""
    await declare(rig.client, "x", *more)
    for i, name in enumerate(ids):
        await rig.client.put_samples([name], "p", {"x": torch.tensor([i])})


# --- what is not there


async def test_an_unknown_id_alone_is_not_found(rig: Rig) -> None:
    """P1: no row came: SampleNotFound itself, naming the id; not retryable, no port blamed, also a KeyError."""
    await fill(rig)
    with pytest.raises(SampleNotFound, match="'nobody'") as caught:
        await rig.client.get_samples(["nobody"], "p", ["x"])
    err = caught.value
    assert isinstance(err, KeyError)
    assert err.sample_ids == ("nobody",)
    assert (err.op, err.partition_id) == ("get_samples", "p")
    assert (err.retryable, err.blames_port, err.ambiguous) == (False, False, False)


async def test_many_unknown_ids_are_all_named(rig: Rig) -> None:
    """P1: where none came, the error tells how many and which."""
    await fill(rig)
    with pytest.raises(SampleNotFound, match=r"none of 3 rows.*'n1'.*'n2'") as caught:
        await rig.client.get_samples(["n1", "n2", "n3"], "p", ["x"])
    assert caught.value.sample_ids == ("n1", "n2", "n3")


async def test_one_unknown_id_of_three_keeps_the_other_rows(rig: Rig) -> None:
    """P1: some came: PartialReadError with the rows in order, both metas, and an error per missing position."""
    await fill(rig)
    with pytest.raises(PartialReadError) as caught:
        await rig.client.get_samples(["s3", "nobody", "s1"], "p", ["x"])
    err = caught.value
    check_same(err.rows["x"], torch.tensor([3, 1]))
    assert err.rows.batch_size == torch.Size([2])
    assert (err.ok.sample_ids, err.failed.sample_ids) == (["s3", "s1"], ["nobody"])
    assert (err.ok.partition_id, err.ok.fields) == ("p", ["x"])
    assert list(err.errors) == [1]
    assert isinstance(err.errors[1], SampleNotFound)
    assert err.sample_ids == ("nobody",)
    assert "nobody" in str(err)
    assert not err.retryable
    check_same((await rig.client.get_data(err.ok))["x"], torch.tensor([3, 1]))


async def test_a_field_that_only_some_have_is_missing_for_the_others(rig: Rig) -> None:
    """P1: never a column fewer: rows without the field are named, the others come."""
    await fill(rig, y=1)
    await rig.client.put_samples(["s0", "s2"], "p", {"y": torch.ones(2)})
    with pytest.raises(PartialReadError) as caught:
        await rig.client.get_samples(["s0", "s1", "s2"], "p", ["x", "y"])
    err = caught.value
    assert sorted(err.rows.keys()) == ["x", "y"]
    check_same(err.rows["x"], torch.tensor([0, 2]))
    missing = err.errors[1]
    assert isinstance(missing, SampleNotFound)
    assert missing.field == "y"
    assert "'y'" in str(missing)


@pytest.mark.parametrize("name", ["y", "mistyped"], ids=["declared", "unknown"])
async def test_a_field_that_nobody_has_is_not_found(rig: Rig, name: str) -> None:
    """P1: it may yet be produced, so a get says SampleNotFound; never an empty TensorDict."""
    await fill(rig, y=1)
    with pytest.raises(SampleNotFound, match=f"'{name}'"):
        await rig.client.get_samples(["s0", "s1"], "p", [name])
    with pytest.raises(SampleNotFound):
        await rig.client.get_samples(["s0"], "p", ["x", name])


async def test_a_sample_of_tags_only_has_no_fields(rig: Rig) -> None:
    """A tag-only sample is there, but none of its fields is."""
    await declare(rig.client)
    await rig.client.put_samples(["a"], "p", tags=[{"k": 1}])
    with pytest.raises(SampleNotFound, match="'x'"):
        await rig.client.get_samples(["a"], "p", ["x"])


async def test_get_data_reads_the_fields_it_is_told(rig: Rig) -> None:
    """select_fields, else meta.fields, else DataPlaneBadRequest; never all fields."""
    await declare(rig.client, "x", "y")
    await rig.client.put_samples(["a"], "p", table(x=torch.zeros(1), y=torch.ones(1)))
    meta = KVBatchMeta("p", sample_ids=["a"])
    assert list((await rig.client.get_data(meta, ["y"])).keys()) == ["y"]
    assert list((await rig.client.get_data(meta.with_fields(["x"]))).keys()) == ["x"]
    assert list((await rig.client.get_data(meta.with_fields(["x"]), ["y"])).keys()) == ["y"]
    with pytest.raises(DataPlaneBadRequest, match="select_fields"):
        await rig.client.get_data(meta)


async def test_metas_of_different_origin_are_read_together(rig: Rig) -> None:
    """A meta that was joined of a put's, a claim's and one made by hand reads all of its rows."""
    await declare(rig.client)
    first = await rig.client.put_samples(["a"], "p", {"x": torch.tensor([0])})
    await rig.client.put_samples(["b", "c"], "p", {"x": torch.tensor([1, 2])})
    claimed = (await rig.client.claim_meta("p", "train", ["x"], 3)).subset([1])
    by_hand = KVBatchMeta("p", sample_ids=["c"], fields=["x"])
    check_same((await rig.mate.get_data(by_hand.concat(first, claimed)))["x"], torch.tensor([2, 0, 1]))


# --- rows that fail once


async def test_only_the_row_that_failed_is_asked_for_again(rig: Rig) -> None:
    """P2: one of 64 rows fails once: the second request asks for that one only."""
    rig.need("slot_addressable")
    ids = [f"r{i}" for i in range(64)]
    asked: list[int] = []

    def spoil(result: ReadResult) -> ReadResult:
        part, *rest = result.parts
        err = DataPlaneUnavailable("reset", host="h", port=1)
        return ReadResult(tuple(rest), {**result.errors, **dict.fromkeys(part.refs, err)})

    class Spoil(Tamper):
        async def serve(self, call: Any, ctx: Any, send: Any) -> Any:
            if isinstance(call, ReadSlots):
                asked.append(sum(len(ref.rows) for ref in call.refs))
            return await super().serve(call, ctx, send)

    client = await rig.attach(Spoil(ReadSlots, change=spoil))
    await fill(rig, ids)
    got = await client.get_samples(ids, "p", ["x"])
    check_same(got["x"], torch.arange(64))
    assert sum(asked) == 65
    assert asked[-1] == 1


async def test_a_read_whose_answer_is_lost_is_sent_again(rig: Rig) -> None:
    """A lost answer costs one more request, not the read."""
    lost = LoseReply(GET)
    client = await rig.attach(lost)
    await fill(rig)
    check_same((await client.get_samples(["s2"], "p", ["x"]))["x"], torch.tensor([2]))
    assert lost.struck == 1


async def test_a_read_that_fails_on_all_attempts_is_the_error_itself(rig: Rig) -> None:
    """No row came: the error itself, typed, with its attempts counted, and not to be retried by anybody inside."""
    client = await rig.attach(Fail(GET, times=999))
    await fill(rig)
    with pytest.raises(DataPlaneUnavailable, match="refused") as caught:
        await client.get_samples(IDS, "p", ["x"], timeout_s=5)
    err = caught.value
    assert err.op == "get_samples"
    assert err.attempts > 1
    assert not err.retryable
    assert not err.ambiguous


async def test_rows_of_a_dead_host_fail_alone(rig: Rig) -> None:
    """One of two hosts is down: the rows of the other one come, each lost row has its error."""
    rig.only("memory")
    await fill(rig)
    hosts = list(rig.transport().plane.hosts.values())
    lost = {row.id for row in rig.transport().plane.partitions["p"].rows.values() if row.cells["x"].host is hosts[0]}
    assert 0 < len(lost) < len(IDS)
    hosts[0].crash()
    with pytest.raises(PartialReadError) as caught:
        await rig.client.get_samples(IDS, "p", ["x"], timeout_s=5)
    err = caught.value
    assert set(err.failed.sample_ids) == lost
    check_same(err.rows["x"], torch.tensor([i for i, name in enumerate(IDS) if name not in lost]))
    assert all(isinstance(e, DataPlaneUnavailable) for e in err.errors.values())
    with pytest.raises(DataPlaneUnavailable):
        await rig.client.get_samples(sorted(lost), "p", ["x"], timeout_s=5)
    hosts[0].restart(adopt=True)
    check_same((await rig.client.get_samples(IDS, "p", ["x"]))["x"], torch.arange(8))


DAMAGE = {
    "nothing": lambda _: ReadResult((), {}),
    "a row fewer": lambda r: _with(r, block=r.parts[0].block.take(range(r.parts[0].block.n - 1))),
    "a column fewer": lambda r: _with(r, block=r.parts[0].block.take(range(r.parts[0].block.n), [])),
    "another length": lambda r: _with(r, nbytes=tuple(n + 1 for n in r.parts[0].nbytes)),
    "another schema": lambda r: _with(r, schema=r.parts[0].schema ^ 1),
}


def _with(result: ReadResult, **changes: Any) -> ReadResult:
    return ReadResult((replace(result.parts[0], **changes), *result.parts[1:]), result.errors)


@pytest.mark.parametrize("name", DAMAGE)
async def test_a_short_or_damaged_transfer_is_never_taken_for_data(rig: Rig, name: str) -> None:
    """P3: damaged once, it is read again; damaged always, it is CorruptPayload."""
    rig.need("slot_addressable")
    harm = Tamper(ReadSlots, change=DAMAGE[name])
    client = await rig.attach(harm)
    await declare(rig.client)
    await rig.client.put_samples(["a", "b"], "p", {"x": torch.arange(2)})
    check_same((await client.get_samples(["a", "b"], "p", ["x"]))["x"], torch.arange(2))
    assert harm.struck == 1
    harm.times = 999
    with pytest.raises((CorruptPayload, PartialReadError)) as caught:
        await client.get_samples(["a", "b"], "p", ["x"], timeout_s=5)
    err = caught.value
    assert all(isinstance(e, CorruptPayload) for e in getattr(err, "errors", {0: err}).values())


async def test_flipped_bits_are_noticed_where_checksums_are_on(rig: Rig) -> None:
    """P3: with checksum, a bit that flips on the way is read again."""
    rig.only("memory")
    client = await rig.open(memory={"checksum": True})

    def flip(result: ReadResult) -> ReadResult:
        result.parts[0].block.columns["x"].values[0] += 1
        return result

    harm = Tamper(ReadSlots, change=flip)
    reader = await rig.attach(harm, to=client)
    await declare(client)
    await client.put_samples(["a"], "p", {"x": torch.tensor([5])})
    check_same((await reader.get_samples(["a"], "p", ["x"]))["x"], torch.tensor([5]))
    assert harm.struck == 1


async def test_a_stored_none_is_none_and_not_an_error(rig: Rig) -> None:
    """P3: None and b"" that were put come back as data."""
    await declare(rig.client)
    await rig.client.put_samples(["a", "b"], "p", {"x": [None, b""]})
    assert rows_of((await rig.client.get_samples(["b", "a"], "p", ["x"])).get("x")) == [b"", None]


# --- references that outlived their data


async def test_a_meta_whose_row_was_cleared_is_stale(rig: Rig) -> None:
    """P8: claim, clear, put others: get_data of the old claim is StaleSlotError, at once and once."""
    rig.need("verified_clear")
    watch = Watch(Locate, GET)
    client = await rig.attach(watch)
    await fill(rig)
    meta = await client.claim_meta("p", "train", ["x"], 2)
    await rig.client.clear_samples(meta.sample_ids, "p")
    await rig.client.put_samples(["n0", "n1"], "p", {"x": torch.tensor([70, 71])})
    with pytest.raises(StaleSlotError) as caught:
        await client.get_data(meta)
    err = caught.value
    assert (err.op, err.retryable, err.blames_port) == ("get_data", False, False)
    assert err.attempts == 1
    assert len(watch.seen) == 1


async def test_a_meta_whose_row_lives_again_is_stale(rig: Rig) -> None:
    """Promise 6: the same id put anew is another sample: never its bytes. By id it is read."""
    await fill(rig)
    meta = await rig.client.claim_meta("p", "train", ["x"], 2)
    await rig.mate.clear_samples(["s0"], "p")
    await rig.mate.put_samples(["s0"], "p", {"x": torch.tensor([70])})
    with pytest.raises(PartialReadError) as caught:
        await rig.client.get_data(meta)
    assert isinstance(caught.value.errors[0], StaleSlotError)
    check_same(caught.value.rows["x"], torch.tensor([1]))
    check_same((await rig.client.get_samples(["s0"], "p", ["x"]))["x"], torch.tensor([70]))
    alone = meta.drop(["s1"])
    assert alone is not None
    with pytest.raises(StaleSlotError, match="'s0'"):
        await rig.client.get_data(alone)


async def test_the_meta_of_a_put_is_a_reference_too(rig: Rig) -> None:
    """Promise 6: what a put returned names the rows it wrote, not what lives under their ids later."""
    await declare(rig.client)
    meta = await rig.client.put_samples(["a"], "p", {"x": torch.zeros(1)})
    await rig.client.clear_samples(["a"], "p")
    await rig.client.put_samples(["a"], "p", {"x": torch.ones(1)})
    with pytest.raises(StaleSlotError):
        await rig.client.get_data(meta)


async def test_a_row_whose_fields_were_replaced_is_read(rig: Rig) -> None:
    """Promise 6: replacing fields is no new life: the meta reads the new values."""
    await fill(rig)
    meta = await rig.client.claim_meta("p", "train", ["x"], 2)
    await rig.mate.put_samples(["s0"], "p", {"x": torch.tensor([70])})
    check_same((await rig.client.get_data(meta))["x"], torch.tensor([70, 1]))


@pytest.mark.parametrize("rows", [1, 3])
async def test_a_row_replaced_between_look_up_and_read_is_read_whole(rig: Rig, rows: int) -> None:
    """P17: the reader holds an old reference while the field is replaced: it gets the new row, whole."""
    hold = Hold(GET)
    client = await rig.attach(hold)
    await declare(rig.client, "x", "y")
    ids = IDS[:rows]
    await rig.client.put_samples(ids, "p", table(x=torch.zeros(rows), y=torch.zeros(rows, 2)))

    async def put() -> None:
        await hold.holds()
        await rig.client.put_samples(["s0"], "p", table(x=torch.ones(1), y=torch.ones(1, 2)))
        hold.go.set()

    got, _ = await at_once(client.get_samples(ids, "p", ["x", "y"]), put())
    check_same(got["x"], torch.tensor([1.0, 0.0, 0.0][:rows]))
    check_same(got["y"], torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]][:rows]))


@pytest.mark.parametrize("again", [False, True], ids=["cleared", "lives again"])
async def test_a_row_cleared_between_look_up_and_read_is_stale(rig: Rig, *, again: bool) -> None:
    """Promise 6: never the bytes of a recycled slot, and never a row of two lives."""
    rig.need("slot_addressable")
    hold = Hold(GET, times=9)
    client = await rig.attach(hold)
    await fill(rig)

    async def clear() -> None:
        await hold.holds()
        await rig.client.clear_samples(["s0"], "p")
        if again:
            await rig.client.put_samples(["s0"], "p", {"x": torch.tensor([70])})
        await rig.client.put_samples(["other"], "p", {"x": torch.tensor([71])})
        hold.go.set()

    got, _ = await at_once(client.get_samples(["s1", "s0"], "p", ["x"]), clear())
    assert isinstance(got, PartialReadError)
    assert isinstance(got.errors[1], StaleSlotError)
    check_same(got.rows["x"], torch.tensor([1]))


async def test_the_other_rows_of_a_slot_are_read_though_one_was_cleared(rig: Rig) -> None:
    """Promise 6: rows of one put share a slot; one that is cleared meanwhile takes no other with it."""
    hold = Hold(GET, times=9)
    client = await rig.attach(hold)
    await declare(rig.client)
    await rig.client.put_samples(IDS, "p", {"x": torch.arange(8)})

    async def clear() -> None:
        await hold.holds()
        await rig.client.clear_samples(["s3"], "p")
        hold.go.set()

    got, _ = await at_once(client.get_samples(IDS, "p", ["x"]), clear())
    assert isinstance(got, PartialReadError)
    assert got.failed.sample_ids == ["s3"]
    check_same(got.rows["x"], torch.tensor([0, 1, 2, 4, 5, 6, 7]))


async def test_a_clear_during_the_transfer_is_noticed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that dies while its bytes are on their way is not delivered as if it lived, and its slot comes back."""
    rig.only("memory")
    await fill(rig, ["a"])
    hosts = rig.transport().plane.hosts.values()
    during: list[int] = []

    async def wire(call: Any) -> None:
        if isinstance(call, ReadSlots):
            await rig.mate.clear_samples(["a"], "p")
            during.append(sum(host.counts()["ready"] for host in hosts))

    monkeypatch.setattr(rig.transport(), "_wire", wire)
    with pytest.raises(StaleSlotError):
        await rig.client.get_samples(["a"], "p", ["x"])
    assert during == [1], "doomed, not freed, while it is read"
    assert sum(host.counts()["ready"] for host in hosts) == 0


async def test_a_host_that_came_back_empty_is_stale_not_wrong(rig: Rig) -> None:
    """S14: after a restart without adoption old references are StaleSlotError, and new puts work."""
    rig.only("memory")
    await fill(rig, ["a", "b"])
    for host in rig.transport().plane.hosts.values():
        host.crash()
        host.restart(adopt=False)
    with pytest.raises(StaleSlotError):
        await rig.client.get_samples(["a", "b"], "p", ["x"])
    await rig.client.put_samples(["a"], "p", {"x": torch.tensor([7])})
    check_same((await rig.client.get_samples(["a"], "p", ["x"]))["x"], torch.tensor([7]))
    (group,) = [g for g in await rig.client.list_metadata("p") if g.group_id == "b"]
    assert (group.lost_keys, group.is_complete) == (("b",), False)


async def test_a_raw_error_of_the_backend_is_typed(rig: Rig) -> None:
    """Whatever a backend raises leaves the client as an error of the plane that keeps its cause."""
    raw = RuntimeError("bare metal")

    def fail() -> Any:
        raise raw

    client = await rig.attach(Fail(GET, make=fail, times=99))
    await fill(rig)
    with pytest.raises(DataPlaneReadError, match="bare metal") as caught:
        await client.get_samples(["s0"], "p", ["x"])
    assert caught.value.__cause__ is raw
    assert caught.value.cause_text == "RuntimeError: bare metal"
    assert not caught.value.retryable


@pytest.mark.parametrize(
    ("raw", "typed"),
    [
        (ConnectionRefusedError("no"), DataPlaneUnavailable),
        (ConnectionResetError("gone"), DataPlaneUnavailable),
        (TimeoutError("late"), DataPlaneTimeout),
        (EOFError("end"), DataPlaneUnavailable),
        (KeyError("k"), DataPlaneReadError),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, Exception) else "",
)
async def test_raw_connectivity_errors_keep_their_meaning(
    rig: Rig, raw: Exception, typed: type[DataPlaneError]
) -> None:
    """A controller routes on classes: refused and reset are Unavailable, late is Timeout, on reads as well."""

    def fail() -> Any:
        raise raw

    client = await rig.attach(Fail(GET, make=fail, times=999))
    await fill(rig)
    with pytest.raises(typed):
        await client.get_samples(["s0"], "p", ["x"], timeout_s=5)
