"""GroupWriter on the memory plane, in virtual time: a group is written as a whole, or nothing of it is left."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import pytest
import torch

from asyncdp import Client, DataPlaneBadRequest, DataPlaneError, DataPlaneUnavailable, MemoryTransport
from asyncdp.recovery import CapacityLedger, GroupWriter
from asyncdp.testing import FaultPlan, faulty_stack, run_virtual

BACKENDS = ["asyncio", "trio"]


def on_a_plane(check: Callable[[Client], Any], plan: FaultPlan | None = None, backend: str = "asyncio") -> None:
    """Run a check with a client of a fresh plane."""

    async def run() -> None:
        async with faulty_stack(MemoryTransport(), plan or FaultPlan(), attempt_timeout_s=1.0) as client:
            await client.register_partition("p", ["x"], 8, ["train"])
            await check(client)

    run_virtual(run, backend)  # type: ignore[arg-type]


async def keys(client: Client) -> list[str]:
    """Return the ids of all rows."""
    return sorted(key for group in await client.list_metadata("p") for key in group.keys)


def x(value: float) -> dict[str, torch.Tensor]:
    """Return one row."""
    return {"x": torch.tensor([value])}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_group_is_claimed_once_it_is_committed(backend: str) -> None:
    """Row by row, with a failed one among them: claims see none before all are there, then those that are fit."""

    async def check(client: Client) -> None:
        async with GroupWriter(client, "p", "g", size=2, weight_version=7) as group:
            await group.put(["a"], x(1.0), [{"input_lengths": 3}])
            await group.fail("b", "the environment crashed", tags={"prompt": 4})
            await group.put(["c"], x(2.0))
            assert await client.depth("p") == 0
            assert (await client.claim_meta("p", "train", ["x"], 2, blocking=False)).size == 0
            assert group.meta is not None
            assert (group.meta.sample_ids, group.failed) == (["a", "c"], 1)
        (listed,) = await client.list_metadata("p")
        assert (listed.group_id, listed.weight_version, listed.expected_num_keys) == ("g", 7, 2)
        assert (listed.committed, listed.is_complete, await client.depth("p")) == (True, True, 1)
        tags = dict(zip(listed.keys, listed.tags, strict=True))
        assert (tags["a"]["input_lengths"], tags["b"]["status"]) == (3, "failed")
        assert (tags["b"]["failure"], tags["b"]["prompt"]) == ("the environment crashed", 4)
        claimed = await client.claim_meta("p", "train", ["x"], 2)
        assert (claimed.sample_ids, claimed.sequence_lengths) == (["a", "c"], None)
        assert (await client.get_data(claimed))["x"].tolist() == [1.0, 2.0]

    on_a_plane(check, backend=backend)


@pytest.mark.parametrize("with_ledger", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failure_in_the_middle_leaves_nothing(backend: str, with_ledger: bool) -> None:  # noqa: FBT001
    """The first error goes up as it was; the place is given back; rows of others stay."""

    async def check(client: Client) -> None:
        ledger = CapacityLedger(client, "p", 1)
        await client.put_samples(["theirs"], "p", x(0.0), [{"group_id": "h"}])
        place = await ledger.reserve("g")
        with pytest.raises(ZeroDivisionError) as raised:  # noqa: PT012 - the block fails
            async with GroupWriter(
                client, "p", "g", size=2, weight_version=7, reservation=place, ledger=ledger if with_ledger else None
            ) as group:
                await group.put(["a"], x(1.0))
                raise ZeroDivisionError
        assert not hasattr(raised.value, "rollback_error")
        assert (await keys(client), ledger.used) == (["theirs"], 0 if with_ledger else 1)
        await ledger.rebuild()
        assert ledger.used == 1

    on_a_plane(check, backend=backend)


def test_a_row_of_somebody_else_is_neither_written_nor_removed() -> None:
    """Only what this writer created is rolled back: not what lived before, nor what was put anew since."""

    async def check(client: Client) -> None:
        await client.put_samples(["b"], "p", x(9.0), [{"group_id": "other"}])
        with pytest.raises(DataPlaneBadRequest, match="'b'"):  # noqa: PT012 - the block fails
            async with GroupWriter(client, "p", "g", size=2, weight_version=7) as group:
                await group.put(["a"], x(1.0))
                await client.clear_samples(["a"], "p")
                await client.put_samples(["a"], "p", x(5.0), [{"group_id": "new"}])
                await group.put(["b"], x(2.0))
        assert await keys(client) == ["a", "b"]
        assert (await client.get_samples(["a", "b"], "p", ["x"]))["x"].tolist() == [5.0, 9.0]

    on_a_plane(check)


def test_a_group_that_was_evicted_meanwhile_is_not_committed() -> None:
    """The writer is told, and removes the rest."""

    async def check(client: Client) -> None:
        with pytest.raises(DataPlaneError):  # noqa: PT012 - the block fails
            async with GroupWriter(client, "p", "g", size=2, weight_version=7) as group:
                await group.put(["a"], x(1.0))
                await group.put(["b"], x(1.0))
                await client.evict(["a"], "p")
        assert await keys(client) == []

    on_a_plane(check)


@pytest.mark.parametrize("lost", ["lose_reply", "lose_request"])
def test_a_put_without_an_answer_is_rolled_back_as_well(lost: str) -> None:
    """Whether it happened is found out first."""
    plan = getattr(FaultPlan().on("put_samples", call="Publish"), lost)(after=1, times=4)

    async def check(client: Client) -> None:
        with pytest.raises(DataPlaneError) as raised:  # noqa: PT012 - the block fails
            async with GroupWriter(client, "p", "g", size=2, weight_version=7) as group:
                await group.put(["a"], x(1.0))
                await group.put(["b"], x(1.0))
        assert raised.value.ambiguous
        assert not hasattr(raised.value, "rollback_error")
        assert await keys(client) == []

    on_a_plane(check, plan)


def test_a_rollback_leaves_the_group_of_another_writer_committed() -> None:
    """A put of which nobody knows whether it happened is settled without a change to rows that others wrote."""
    plan = FaultPlan().on("put_samples", call="Publish").lose_request(times=4)

    async def check(client: Client) -> None:
        late = GroupWriter(client, "p", "g", size=2, weight_version=7)
        with pytest.raises(DataPlaneError) as raised:  # noqa: PT012 - the block fails
            async with late:
                try:
                    await late.put(["a", "b"], {"x": torch.zeros(2)})
                finally:
                    async with GroupWriter(client, "p", "g", size=2, weight_version=7) as group:
                        await group.put(["a", "b"], {"x": torch.ones(2)})
        assert raised.value.ambiguous
        assert not hasattr(raised.value, "rollback_error")
        (listed,) = await client.list_metadata("p")
        assert (listed.committed, listed.is_complete, await client.depth("p")) == (True, True, 1)
        assert (await client.get_samples(["a", "b"], "p", ["x"]))["x"].tolist() == [1.0, 1.0]

    on_a_plane(check, plan)


@pytest.mark.parametrize("failed", [False, True], ids=["fit", "all failed"])
@pytest.mark.parametrize("with_ledger", [True, False])
@pytest.mark.parametrize("ends", ["fails", "is cancelled"])
def test_a_committed_group_stays_whatever_becomes_of_its_reservation(
    ends: str,
    with_ledger: bool,  # noqa: FBT001
    failed: bool,  # noqa: FBT001
) -> None:
    """The block does not fail with the removal of the reservation; the next listing removes it, the place stays."""
    plan = FaultPlan().on("clear_samples")
    plan = plan.silent(for_s=5.0) if ends == "is cancelled" else plan.error(DataPlaneUnavailable, "away", for_s=30.0)

    async def check(client: Client) -> None:
        ledger = CapacityLedger(client, "p", 2)
        place = await ledger.reserve("g")
        with anyio.move_on_after(0.5 if ends == "is cancelled" else 60.0) as limit:
            async with GroupWriter(
                client,
                "p",
                "g",
                size=1,
                weight_version=7,
                reservation=place,
                ledger=ledger if with_ledger else None,
            ) as group:
                await (group.fail("a", "it crashed") if failed else group.put(["a"], x(1.0)))
        assert limit.cancelled_caught is (ends == "is cancelled")
        assert (await client.depth("p"), ledger.used) == (0 if failed else 1, 1)
        await anyio.sleep(60.0)
        await ledger.rebuild()
        assert (await keys(client), ledger.used) == (["a"], 1)

    on_a_plane(check, plan)


@pytest.mark.parametrize("backend", BACKENDS)
def test_cancelled_at_any_moment_it_leaves_all_or_nothing(backend: str) -> None:
    """The cancellation goes up; a group is whole and committed, or there is no row of it."""

    async def check(client: Client) -> None:
        whole = 0
        for step in range(40):
            ids = [f"s{step}_g0", f"s{step}_g1"]
            with anyio.move_on_after(0.1 * step):
                async with GroupWriter(client, "p", f"s{step}", size=2, weight_version=7) as group:
                    await group.put(ids[:1], x(1.0))
                    await group.put(ids[1:], x(1.0))
            left = [one for one in await client.list_metadata("p") if one.group_id == f"s{step}"]
            assert all(one.committed and one.is_complete for one in left)
            whole += len(left)
        assert 0 < whole < 40

    on_a_plane(check, FaultPlan(seed=5).on("put_samples").delay(p50_s=0.2, p99_s=1.0), backend)


@pytest.mark.parametrize("error", [DataPlaneUnavailable, DataPlaneBadRequest])
def test_a_rollback_that_fails_is_attached_to_the_first_error(error: type[Exception]) -> None:
    """The first error goes up; the second one is at hand, and in the traceback. What is left cannot be claimed."""
    plan = FaultPlan().on("clear_samples").error(error, "away", for_s=1e6)

    async def check(client: Client) -> None:
        with pytest.raises(ZeroDivisionError) as raised:  # noqa: PT012 - the block fails
            async with GroupWriter(client, "p", "g", size=2, weight_version=7) as group:
                await group.put(["a"], x(1.0))
                raise ZeroDivisionError
        assert isinstance(raised.value.rollback_error, (error, TimeoutError))  # type: ignore[attr-defined]
        assert type(raised.value.rollback_error) is error or error is DataPlaneUnavailable  # type: ignore[attr-defined]
        assert "The rollback of the group failed too: " in raised.value.__notes__[0]
        assert (await client.list_metadata("p"))[0].committed is False

    on_a_plane(check, plan)


def test_a_commit_and_a_rollback_that_fail_are_both_told() -> None:
    """The commit's error goes up, with that of the rollback; the reservation goes with a later listing."""
    plan = FaultPlan().on("clear_samples").error(DataPlaneUnavailable, "away", for_s=1e6)

    async def check(client: Client) -> None:
        with pytest.raises(DataPlaneError) as raised:  # noqa: PT012 - the block fails
            async with GroupWriter(client, "p", "g", size=2, weight_version=7) as group:
                await group.put(["a"], x(1.0))
                await group.put(["b"], x(1.0))
                await client.evict(["a"], "p")
        assert isinstance(raised.value.rollback_error, (DataPlaneUnavailable, TimeoutError))  # type: ignore[attr-defined]

    on_a_plane(check, plan)


def test_failures_are_counted_and_calls_take_as_long_as_they_may() -> None:
    """``timeout_s`` is that of the put."""
    plan = FaultPlan().on("put_samples").silent(at_s=60.0)

    async def check(client: Client) -> None:
        with suppress(DataPlaneError):
            async with GroupWriter(client, "p", "g", size=2, weight_version=7) as group:
                assert (group.failed, group.meta) == (0, None)
                await group.fail("a", "it crashed")
                await group.fail("b", "it crashed")
                assert group.failed == 2
                await anyio.sleep(61.0)
                for call in (group.put(["c"], x(1.0), timeout_s=2.0), group.fail("d", "it crashed", timeout_s=2.0)):
                    began = anyio.current_time()
                    with pytest.raises(DataPlaneError):
                        await call
                    assert anyio.current_time() - began < 2.5
                assert group.failed == 2

    on_a_plane(check, plan)


@pytest.mark.parametrize("refused", [False, True])
def test_a_put_without_an_answer_is_rolled_back_whatever_came_after_it(refused: bool) -> None:  # noqa: FBT001
    """The writer goes on with another put, which works or is refused; the first one had happened."""
    plan = FaultPlan().on("put_samples", call="Publish").lose_reply(after=1, times=4)

    async def check(client: Client) -> None:
        await client.put_samples(["theirs"], "p", x(9.0), [{"group_id": "h"}])
        with suppress(ZeroDivisionError):
            async with GroupWriter(client, "p", "g", size=2, weight_version=7) as group:
                with pytest.raises(DataPlaneError) as raised:
                    await group.put(["a"], x(1.0))
                assert raised.value.ambiguous
                with suppress(DataPlaneBadRequest):
                    await group.put(["theirs"] if refused else ["b"], x(1.0))
                raise ZeroDivisionError
        assert await keys(client) == ["theirs"]

    on_a_plane(check, plan)


def test_a_rollback_that_takes_too_long_says_so() -> None:
    """With the error that it follows, which goes up after ten seconds at the most."""
    plan = FaultPlan().silent(at_s=5.0)

    async def check(client: Client) -> None:
        with pytest.raises(ZeroDivisionError) as raised:  # noqa: PT012 - the block fails
            async with GroupWriter(client, "p", "g", size=2, weight_version=7) as group:
                await group.put(["a"], x(1.0))
                await anyio.sleep(6.0)
                began = anyio.current_time()
                raise ZeroDivisionError
        assert anyio.current_time() - began <= 10.5
        assert str(raised.value.rollback_error) == "the rollback took longer than 10 s"  # type: ignore[attr-defined]
        assert raised.value.__notes__ == [
            "The rollback of the group failed too: TimeoutError: the rollback took longer than 10 s"
        ]

    on_a_plane(check, plan)


def test_a_rollback_takes_a_bounded_time() -> None:
    """A plane that does not answer at all does not keep a worker that was told to end."""
    plan = FaultPlan().silent(at_s=5.0)

    async def check(client: Client) -> None:
        with anyio.CancelScope() as scope:
            async with GroupWriter(client, "p", "g", size=2, weight_version=7) as group:
                await group.put(["a"], x(1.0))
                await anyio.sleep(6.0)
                scope.cancel()
                began = anyio.current_time()
                await anyio.sleep(1.0)
        assert anyio.current_time() - began <= 10.5

    on_a_plane(check, plan)


def test_a_writer_that_wrote_nothing_gives_its_place_back() -> None:
    """As one that wrote failures only commits them, to be counted."""

    async def check(client: Client) -> None:
        ledger = CapacityLedger(client, "p", 2)
        async with GroupWriter(client, "p", "g", size=2, weight_version=7, reservation=await ledger.reserve("g")):
            pass
        assert await keys(client) == []
        async with GroupWriter(
            client, "p", "h", size=2, weight_version=7, reservation=await ledger.reserve("h")
        ) as group:
            await group.fail("h0", "no answer")
        assert await keys(client) == ["h0"]
        assert await client.depth("p") == 0

    on_a_plane(check)


@pytest.mark.parametrize("with_ledger", [True, False])
@pytest.mark.parametrize(
    ("puts", "failed", "got"),
    [([["a"]], 0, "1"), ([["a"], ["b"]], 0, "2"), ([["a"]], 1, "1 and 1 failed ones")],
)
def test_a_group_with_too_few_rows_is_not_committed(
    puts: list[list[str]],
    failed: int,
    got: str,
    with_ledger: bool,  # noqa: FBT001
) -> None:
    """The end of the block says how many there are; nothing is left, and the place is free."""

    async def check(client: Client) -> None:
        ledger = CapacityLedger(client, "p", 1)
        place = await ledger.reserve("g")
        with pytest.raises(DataPlaneBadRequest, match=f"group 'g' has 3 rows, and {got} were put") as raised:  # noqa: PT012 - the block fails
            async with GroupWriter(
                client, "p", "g", size=3, weight_version=7, reservation=place, ledger=ledger if with_ledger else None
            ) as group:
                for ids in puts:
                    await group.put(ids, x(1.0))
                for one in range(failed):
                    await group.fail(f"f{one}", "it crashed")
        assert raised.value.field == "size"
        await ledger.rebuild()
        assert (await keys(client), ledger.used) == ([], 0)

    on_a_plane(check)


@pytest.mark.parametrize("swallowed", [False, True])
def test_a_put_of_too_many_rows_is_refused(swallowed: bool) -> None:  # noqa: FBT001
    """Nothing of it is written: the group can be committed without it, else nothing of it is left."""

    async def check(client: Client) -> None:
        with suppress(DataPlaneBadRequest):
            async with GroupWriter(client, "p", "g", size=2, weight_version=7) as group:
                await group.put(["a"], x(1.0))
                with pytest.raises(
                    DataPlaneBadRequest, match=r"group 'g' has 2 rows, and .* it would have 3"
                ) as raised:
                    await group.put(["b", "c"], {"x": torch.zeros(2)})
                assert raised.value.field == "sample_ids"
                if not swallowed:
                    raise raised.value
                await group.put(["d"], x(1.0))
                await group.fail("e", "it crashed")
        assert await keys(client) == (["a", "d", "e"] if swallowed else [])
        assert await client.depth("p") == (1 if swallowed else 0)

    on_a_plane(check)


def test_rows_of_which_nobody_knows_count_as_rows_of_the_group() -> None:
    """A put without an answer and others in its place would make too many; the same rows may be put again."""
    plan = FaultPlan().on("put_samples", call="Publish").lose_request(times=4)

    async def check(client: Client) -> None:
        async with GroupWriter(client, "p", "g", size=2, weight_version=7) as group:
            with pytest.raises(DataPlaneError) as raised:
                await group.put(["a"], x(1.0))
            assert raised.value.ambiguous
            with pytest.raises(DataPlaneBadRequest, match="it would have 3"):
                await group.put(["b", "c"], {"x": torch.zeros(2)})
            await group.put(["a", "b"], {"x": torch.zeros(2)})
        assert (await keys(client), await client.depth("p")) == (["a", "b"], 1)

    on_a_plane(check, plan)


def test_a_failed_row_of_which_nobody_knows_takes_no_place_of_another() -> None:
    """The group is committed with its rows; a block that wrote nothing else leaves nothing."""
    plan = FaultPlan().on("put_samples", call="Publish").lose_reply(times=4)

    async def check(client: Client, *, alone: bool) -> None:
        with suppress(DataPlaneBadRequest):
            async with GroupWriter(client, "p", "g", size=1, weight_version=7) as group:
                with pytest.raises(DataPlaneError) as raised:
                    await group.fail("a", "it crashed")
                assert raised.value.ambiguous
                if not alone:
                    await group.put(["b"], x(1.0))
        assert await keys(client) == ([] if alone else ["a", "b"])

    on_a_plane(lambda client: check(client, alone=False), plan.fresh())
    on_a_plane(lambda client: check(client, alone=True), plan.fresh())


def test_failed_rows_stand_for_missing_ones() -> None:
    """The group is committed, so that it is counted, and is listed as incomplete."""

    async def check(client: Client) -> None:
        async with GroupWriter(client, "p", "g", size=2, weight_version=7) as group:
            await group.put(["a"], x(1.0))
            await group.fail("b", "it crashed")
        (listed,) = await client.list_metadata("p")
        assert (listed.committed, listed.is_complete, sorted(listed.keys)) == (True, False, ["a", "b"])

    on_a_plane(check)


def test_a_writer_writes_within_its_block_once() -> None:
    """Before and after it nothing would commit or remove what it wrote."""

    async def check(client: Client) -> None:
        group = GroupWriter(client, "p", "g", size=1, weight_version=7)
        with pytest.raises(DataPlaneBadRequest, match=r"group 'g' .* was not entered"):
            await group.put(["a"], x(1.0))
        with pytest.raises(DataPlaneBadRequest, match=r"group 'g' .* was not entered"):
            await group.fail("b", "it crashed")
        async with group:
            await group.put(["a"], x(1.0))
        with pytest.raises(DataPlaneBadRequest, match=r"group 'g' .* has ended"):
            await group.fail("b", "it crashed")
        with pytest.raises(DataPlaneBadRequest, match=r"group 'g' .* was entered before"):
            await group.__aenter__()
        assert await keys(client) == ["a"]

    on_a_plane(check)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"partition_id": ""}, "partition_id"),
        ({"group_id": 3}, "group_id"),
        ({"group_id": ""}, "group_id"),
        ({"size": 0}, "size"),
        ({"size": True}, "size"),
        ({"size": "2"}, "size"),
        ({"weight_version": "new"}, "weight_version"),
    ],
)
def test_its_arguments_are_checked(wrong: dict[str, Any], field: str) -> None:
    """When it is made."""

    async def check(client: Client) -> None:
        with pytest.raises(DataPlaneBadRequest, match=field) as raised:
            GroupWriter(client, **({"partition_id": "p", "group_id": "g", "size": 2, "weight_version": 7} | wrong))
        assert raised.value.field == field

    on_a_plane(check)


def test_the_arguments_of_its_puts_are_checked() -> None:
    """As those of put_samples."""

    async def check(client: Client) -> None:
        async with GroupWriter(client, "p", "g", size=1, weight_version=7) as group:
            for ids, tags in (("a", None), ([3], None), (None, None), (["a"], [{}, {}]), (["a"], [3]), (["a"], "t")):
                with pytest.raises(DataPlaneBadRequest, match=r"sample_ids|tags"):
                    await group.put(ids, x(1.0), tags)  # type: ignore[arg-type]
            for one, more in ((None, None), ("", None), ("a", 3)):
                with pytest.raises(DataPlaneBadRequest, match=r"sample_id|tags"):
                    await group.fail(one, "it crashed", tags=more)  # type: ignore[arg-type]
        assert await keys(client) == []

    on_a_plane(check)
