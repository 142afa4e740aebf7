"""RecoveryLoop on the memory plane, in virtual time."""

import inspect
import os
import pickle
import random
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import anyio
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from asyncdp import (
    ClaimNotReady,
    Client,
    DataPlaneBadRequest,
    DataPlaneClosed,
    DataPlaneGroupMeta,
    DataPlaneNotReady,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    MemoryTransport,
    SampleNotFound,
    stack,
)
from asyncdp.middleware.policy.backoff import Backoff
from asyncdp.recovery import (
    CapacityLedger,
    GroupWriter,
    RecoveryGaveUp,
    RecoveryLoop,
    RecoveryStep,
    Selector,
    is_outage,
)
from asyncdp.recovery.machine import Event, RecoveryMachine
from asyncdp.testing import FaultPlan, faulty_stack, run_virtual

BACKENDS = ["asyncio", "trio"]
#: A history that fails is told as it is: to make it shorter takes minutes.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
#: Controllers of the long test; 1,000 take an hour on a busy machine.
CONTROLLERS = int(os.environ.get("ASYNCDP_CONTROLLERS", "150"))


def on_a_plane(check: Callable[[Client], Any], plan: FaultPlan | None = None, backend: str = "asyncio") -> None:
    """Run a check with a client of a fresh plane that has a partition of groups of two."""

    async def run() -> None:
        async with faulty_stack(
            MemoryTransport(), plan or FaultPlan(), attempt_timeout_s=1.0, outage_patience_s=0
        ) as client:
            await declare(client)
            await check(client)

    run_virtual(run, backend)  # type: ignore[arg-type]


async def declare(client: Client) -> None:
    """Declare the partition."""
    await client.register_partition("p", ["x"], 8, ["train"], grpo_group_size=2)


async def put_group(client: Client, name: str, version: int | None = 5, rows: int = 2) -> None:
    """Put a group, whole or not."""
    tags = [{} if version is None else {"weight_version": version}] * rows
    await client.put_samples([f"{name}_g{i}" for i in range(rows)], "p", {"x": torch.zeros(rows)}, tags)


async def groups(client: Client) -> list[str]:
    """Return the ids of the groups, without reservations."""
    return [one.group_id for one in await client.list_metadata("p") if "reservation_for" not in one.tags[0]]


def loop_on(client: Client, **kwargs: Any) -> RecoveryLoop:
    """Make a loop of a controller at weight version 5, with room for four groups."""
    ledger = kwargs.pop("ledger", None) or CapacityLedger(client, "p", 4)
    selector = kwargs.pop("selector", None) or Selector()
    return RecoveryLoop(ledger, selector, lambda: 5, rng=random.Random(1), **kwargs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_controller_that_is_started_again_puts_all_in_order_before_it_goes_on(backend: str) -> None:
    """Trained groups are popped, stale and incomplete ones evicted, claims of the dead released; then it opens."""

    async def check(client: Client) -> None:
        for name, version in (("trained", 5), ("stale", 1), ("untagged", None), ("good", 5), ("ahead", 6)):
            await put_group(client, name, version)
        await put_group(client, "half", rows=1)
        ledger = CapacityLedger(client, "p", 4)
        for name in ("made", "dropped"):
            await ledger.reserve(name, owner="worker" if name == "made" else "dead")
        await put_group(client, "made", rows=1)
        await client.claim_meta("p", "train", ["x"], 10)
        told: list[RecoveryStep] = []
        alive = {client.owner: False, "worker": True, "dead": False}

        def journal(listed: Sequence[DataPlaneGroupMeta]) -> list[DataPlaneGroupMeta]:
            return [one for one in listed if one.group_id == "trained"]

        loop = loop_on(client, alive=alive.__getitem__, trained=journal, on_event=told.append)
        assert not loop.ledger.gate.is_open
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.run)
            await loop.ledger.gate.wait()
            assert sorted(await groups(client)) == ["ahead", "good", "made"]
            assert loop.ledger.used == 3
            assert loop.removed == {"trained": 1, "stale": 1, "untagged": 1, "incomplete": 1}
            assert (loop.released, await client.list_claims("p", "train")) == (1, [])
            tasks.cancel_scope.cancel()
        assert [str(step.state) for step in told] == ["pinging", "rebuilding", "evicting", "releasing"]
        assert [step.detail for step in told] == [
            {},
            {"used": 7, "capacity": 4},
            {
                "removed": {"trained": 1, "stale": 1, "untagged": 1, "incomplete": 1},
                "waiting": {"ahead": 1, "incomplete": 1},
            },
            {"released": 1, "unknown_owners": {}},
        ]
        assert not loop.ledger.gate.is_open

    on_a_plane(check, backend=backend)


ERRORS: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "nobody answers": (DataPlaneUnavailable, {}),
    "loading, busy, read-only": (DataPlaneUnavailable, {"retry_after_s": 0.5, "blames_port": False}),
    "too slow": (DataPlaneTimeout, {}),
    "full, out of memory": (DataPlaneNotReady, {"retry_after_s": 0.5}),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_who_waits_for_a_loop_that_does_not_run_is_told(backend: str) -> None:
    """By a warning after some seconds, before run is started and after it has ended; meanwhile it waits in silence."""

    async def check(client: Client) -> None:
        loop = loop_on(client)

        async def waits() -> None:
            with anyio.move_on_after(10.0):
                async with loop.reported():
                    pytest.fail("the gate is closed")

        async def left_alone() -> None:
            """Whoever would open the gate goes while somebody waits."""
            async with anyio.create_task_group() as tasks:
                why, loop.ledger.gate.unattended = loop.ledger.gate.unattended, ""
                tasks.start_soon(loop.ledger.gate.wait)
                await anyio.sleep(7.0)
                loop.ledger.gate.unattended = why
                await anyio.sleep(9.0)
                tasks.cancel_scope.cancel()

        with pytest.warns(RuntimeWarning, match="run was not started"):
            await waits()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.run)
            await loop.ledger.gate.wait()
            tasks.cancel_scope.cancel()
        with pytest.warns(RuntimeWarning, match="or has ended"):
            await waits()
        with pytest.warns(RuntimeWarning, match="or has ended"):
            await left_alone()
        with pytest.warns(RuntimeWarning, match="or has ended") as warned, anyio.move_on_after(10.0):
            await loop.ledger.gate.wait()
        assert warned[0].filename == __file__  # it points to who waits
        async with anyio.create_task_group() as tasks:  # one that is started a little later opens it
            tasks.start_soon(loop.ledger.gate.wait)
            await anyio.sleep(4.0)
            tasks.start_soon(loop.run)
            await anyio.sleep(4.0)
            tasks.cancel_scope.cancel()

    on_a_plane(check, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ERRORS)
def test_an_outage_closes_the_gate_and_is_waited_for(name: str, backend: str) -> None:
    """For a minute all calls fail: the pumps wait, then go on; what became stale is evicted before they do."""
    error, attributes = ERRORS[name]
    plan = FaultPlan().error(error, "not now", attributes=attributes, at_s=10, for_s=60)

    async def check(client: Client) -> None:
        client.call_timeout_s = 5.0  # of a backend that answers, layers wait for it so long
        await put_group(client, "old", 3)
        selector = Selector(max_staleness=2)
        loop = loop_on(client, selector=selector, declare=lambda: declare(client), alive=lambda _: True)
        done = []

        async def pump() -> None:
            while True:
                await anyio.sleep(0.5)
                await loop.call(lambda: client.depth("p"))
                done.append(anyio.current_time())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.run)
            tasks.start_soon(pump)
            await anyio.sleep(30)
            assert not loop.ledger.gate.is_open
            selector.max_staleness = 1
            await anyio.sleep(100)
            tasks.cancel_scope.cancel()
        assert loop.outage >= 1
        assert not [at for at in done if 15 < at < 70]
        assert len([at for at in done if at > 90]) > 50
        assert (await groups(client), loop.removed) == ([], {"stale": 1})

    on_a_plane(check, plan.fresh(), backend)


@pytest.mark.parametrize("verb", ["ping", "register_partition", "list_metadata", "evict", "describe", "list_claims"])
def test_whatever_step_fails_the_recovery_begins_again(verb: str) -> None:
    """A plane that answers some verbs only is not taken for one that is back."""
    plan = FaultPlan().on(verb).error(DataPlaneUnavailable, "half back", at_s=20, for_s=60)
    plan = plan.on("depth").error(DataPlaneUnavailable, "away", at_s=20, times=1)

    async def check(client: Client) -> None:
        loop = loop_on(client, declare=lambda: declare(client), alive=lambda _: True, sweep_every_s=1e6)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.run)
            await anyio.sleep(21)
            await put_group(client, "stale", 1)
            with suppress(DataPlaneUnavailable):
                await client.depth("p")
            loop.report(DataPlaneUnavailable("away"))
            loop._tasks = None
            await anyio.sleep(20)
            assert not loop.ledger.gate.is_open
            await anyio.sleep(80)
            assert loop.ledger.gate.is_open
            assert await groups(client) == []
            tasks.cancel_scope.cancel()
        assert loop.outage == 1

    on_a_plane(check, plan)


def test_claims_that_are_not_ready_are_no_outage() -> None:
    """Nor is anything else that waiting for the plane does not mend."""
    assert is_outage(DataPlaneUnavailable("x"))
    assert is_outage(DataPlaneTimeout("x"))
    assert is_outage(DataPlaneNotReady("x"))
    for error in (
        ClaimNotReady("x"),
        DataPlaneBadRequest("x"),
        SampleNotFound("x"),
        DataPlaneClosed("x"),
        TimeoutError(),
    ):
        assert not is_outage(error)

    async def check(client: Client) -> None:
        loop = loop_on(client)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.run)
            with pytest.raises(ClaimNotReady):
                await loop.call(lambda: client.claim_meta("p", "train", ["x"], 2, timeout_s=1.0))
            with pytest.raises(SampleNotFound):
                async with loop.reported():
                    await client.get_samples(["no"], "p", ["x"])
            assert (loop.outage, loop.ledger.gate.is_open) == (0, True)
            async with loop.reported():
                raise DataPlaneUnavailable("away")
            assert (loop.outage, loop.ledger.gate.is_open) == (1, False)
            tasks.cancel_scope.cancel()

    on_a_plane(check)


def test_a_call_that_fails_late_closes_nothing() -> None:
    """It began before an outage that is over; a call of now does."""

    async def check(client: Client) -> None:
        loop = loop_on(client)
        assert loop.outage == 0
        assert loop.story == ()
        assert loop.report(DataPlaneUnavailable("before it runs"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.run)
            await loop.ledger.gate.wait()
            assert loop.report(DataPlaneUnavailable("first"), outage=0)
            assert not loop.ledger.gate.is_open
            assert loop.report(DataPlaneUnavailable("second"), outage=0)
            await loop.ledger.gate.wait()
            assert loop.report(DataPlaneUnavailable("late"), outage=0)
            assert (loop.outage, loop.ledger.gate.is_open) == (1, True)
            assert loop.report(DataPlaneUnavailable("now"), outage=1)
            assert (loop.outage, loop.ledger.gate.is_open) == (2, False)
            assert loop.story[-1].detail == {"error": "DataPlaneUnavailable: now"}
            tasks.cancel_scope.cancel()

    on_a_plane(check)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_gives_up_with_the_whole_story(backend: str) -> None:
    """After its bound; whoever waits for the gate gets the same error, which can be pickled."""

    async def check(client: Client) -> None:
        await anyio.sleep(2.0)
        loop = loop_on(client, give_up_after_s=120.0)
        found: list[Exception] = []

        async def pump() -> None:
            try:
                await loop.call(lambda: client.depth("p"))
            except RecoveryGaveUp as err:
                found.append(err)

        began = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pump)
            with pytest.raises(RecoveryGaveUp) as raised:
                await loop.run()
        assert anyio.current_time() - began == pytest.approx(120.0)
        assert found == [raised.value]
        error = raised.value
        assert (error.op, error.partition_id, error.retryable) == ("recover", "p", False)
        assert error.message.startswith("the plane was not back after 120 s; the steps of outage 0:\n  ")
        assert len(error.story) > 10
        assert "pinging -> waiting: failed, error: DataPlane" in error.story[0]
        assert "given_up: expired" in error.story[-1]
        assert all(line in str(error) for line in error.story)
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.story) == (RecoveryGaveUp, str(error), error.story)
        with pytest.raises(RecoveryGaveUp):
            await loop.ledger.gate.wait()

    on_a_plane(check, FaultPlan().silent(at_s=1.0), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plane_that_recovers_and_never_gives_data_is_given_up(backend: str) -> None:
    """As with a directory that answers and slot hosts that do not: all outages are told, and count together."""

    async def check(client: Client) -> None:
        await put_group(client, "old")
        loop = loop_on(client, give_up_after_s=60.0, backoff_cap_s=5.0)

        async def pump() -> None:
            with suppress(RecoveryGaveUp):
                while True:
                    async with loop.reported():
                        await loop.select(1)
                        raise DataPlaneUnavailable("no data", elapsed_s=0.0)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pump)
            with anyio.fail_after(300.0), pytest.raises(RecoveryGaveUp) as raised:
                await loop.run()
        assert loop.outage > 3
        message = raised.value.message
        assert message.startswith(f"outages 0 to {loop.outage} took 60 s together, and no group was made or trained")
        assert [line.split(",")[0] for line in raised.value.story if "no data" in line] == [
            f"outage {number}" for number in range(1, loop.outage + 1)
        ]

    on_a_plane(check, backend=backend)


@pytest.mark.parametrize(("took_s", "outages"), [(25.0, 3), (0.0, 20)])
def test_the_calls_that_failed_count_towards_the_bound(took_s: float, outages: int) -> None:
    """Three calls of 25 s each are beyond a bound of 60 s; as many that failed at once are not."""

    async def check(client: Client) -> None:
        loop = loop_on(client, give_up_after_s=60.0, backoff_base_s=0.001, backoff_cap_s=0.001)

        async def fail() -> None:
            with suppress(RecoveryGaveUp):
                for _ in range(20):
                    await loop.ledger.gate.wait()
                    await anyio.sleep(26.0)
                    loop.report(DataPlaneUnavailable("no data", elapsed_s=took_s))
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)
            with suppress(RecoveryGaveUp):
                await loop.run()
        assert loop.outage == outages

    on_a_plane(check)


@pytest.mark.parametrize("what", ["made", "trained", "freed"])
def test_a_plane_that_gives_data_now_and_then_is_not_given_up(what: str) -> None:
    """A group that is seen to be made, that is trained, or of which the caller says so, between two outages."""

    async def check(client: Client) -> None:
        loop = loop_on(client, give_up_after_s=20.0, selector=Selector(max_staleness=1000), backoff_cap_s=5.0)
        for number in range(40):
            await put_group(client, f"old{number}")

        async def pump() -> None:
            for number in range(40):
                async with loop.reported():
                    if what == "made":
                        await put_group(client, f"new{number}")
                    elif what == "trained":
                        await loop.finish((await loop.select(1)).chosen)
                    else:
                        loop.ledger.freed([f"elsewhere{number}"])
                    raise DataPlaneUnavailable("no data", elapsed_s=0.0)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.run)
            await pump()
            await loop.ledger.gate.wait()
            tasks.cancel_scope.cancel()
        assert loop.outage == 40

    on_a_plane(check)


def test_what_is_no_progress() -> None:
    """What was there at first, groups that are evicted or given up, committed failures, rows lost and found again."""

    async def check(client: Client) -> None:
        await put_group(client, "old")
        ledger = CapacityLedger(client, "p", 8)
        loop = loop_on(client, ledger=ledger)
        await loop.sweep()
        ledger.gate.open()
        await ledger.release(await ledger.reserve("given-up"))
        await put_group(client, "half", rows=1)
        with suppress(ZeroDivisionError):
            async with GroupWriter(client, "p", "failed", size=2, weight_version=5) as group:
                await group.fail("failed_g0", "away")
                await group.fail("failed_g1", "away")
        await loop.sweep()
        assert (ledger.progress, loop.removed["incomplete"]) == (0, 1)
        await put_group(client, "new")
        await loop.sweep()
        await loop.sweep()
        assert ledger.progress == 1

    on_a_plane(check)


def test_a_secret_that_is_wrong_from_the_start_goes_up_at_once() -> None:
    """Later it is an outage: another process may have taken the port of a host that is away."""
    error = DataPlaneUnavailable("refused", refused=True)
    assert pickle.loads(pickle.dumps(error)).refused

    async def check(client: Client) -> None:
        loop = loop_on(client)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.run)
            await loop.ledger.gate.wait()
            with pytest.raises(DataPlaneUnavailable, match="refused"):
                async with loop.reported():
                    raise error
            assert loop.ledger.gate.is_open
            loop.ledger.freed(["trained"])
            async with loop.reported():
                raise error
            assert not loop.ledger.gate.is_open
            tasks.cancel_scope.cancel()

    on_a_plane(check)


@pytest.mark.slow
def test_a_long_story_says_what_it_leaves_out() -> None:
    """Its beginning and its end are told."""

    async def check(client: Client) -> None:
        await anyio.sleep(2.0)
        loop = loop_on(client, give_up_after_s=3000.0, backoff_cap_s=0.5)
        with pytest.raises(RecoveryGaveUp) as raised:
            await loop.run()
        assert len(raised.value.story) == 201
        assert "steps are not shown)" in raised.value.story[100]

    on_a_plane(check, FaultPlan().silent(at_s=1.0))


def test_what_waiting_does_not_mend_goes_up_at_once() -> None:
    """A misspelt partition, a closed client, a mistake in what the caller gave: pumps are told as well."""

    async def check(client: Client) -> None:
        misspelt = RecoveryLoop(CapacityLedger(client, "q", 4), Selector(), lambda: 5)
        with pytest.raises(DataPlaneBadRequest):
            await misspelt.run()
        with pytest.raises(DataPlaneBadRequest):
            await misspelt.ledger.gate.wait()
        broken = RecoveryLoop(CapacityLedger(client, "p", 4), Selector(), lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            await broken.run()
        with pytest.raises(ZeroDivisionError):
            await broken.call(lambda: client.depth("p"))
        closed = loop_on(client)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(expect, DataPlaneClosed, closed.run)
            await closed.ledger.gate.wait()
            await client.close()

    on_a_plane(check)


async def expect(kind: type[Exception], call: Callable[[], Any]) -> None:
    """Make a call that is to fail."""
    with pytest.raises(kind):
        await call()


@pytest.mark.parametrize("backend", BACKENDS)
def test_between_outages_the_partition_is_put_in_order_now_and_then(backend: str) -> None:
    """Stale and abandoned groups go, places come back, without a fault."""

    async def check(client: Client) -> None:
        loop = loop_on(client, sweep_every_s=10.0, selector=Selector(incomplete_grace_s=15.0))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.run)
            await loop.ledger.gate.wait()
            await put_group(client, "stale", 3)
            await put_group(client, "half", rows=1)
            await put_group(client, "good")
            await anyio.sleep(11.0)
            assert sorted(await groups(client)) == ["good", "half"]
            await anyio.sleep(20.0)
            assert await groups(client) == ["good"]
            assert (loop.ledger.used, loop.outage) == (1, 0)
            tasks.cancel_scope.cancel()

    on_a_plane(check, backend=backend)


@pytest.mark.parametrize("error", [DataPlaneUnavailable, SampleNotFound])
def test_a_sweep_that_fails_is_an_outage(error: type[Exception]) -> None:
    """Whatever the plane says, it is waited for; nobody's task ends."""
    plan = FaultPlan().on("list_metadata").error(error, "strange", at_s=20, for_s=20)

    async def check(client: Client) -> None:
        loop = loop_on(client)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.run)
            await anyio.sleep(30.0)
            assert not loop.ledger.gate.is_open
            await anyio.sleep(60.0)
            assert loop.ledger.gate.is_open
            tasks.cancel_scope.cancel()

    on_a_plane(check, plan)


def test_groups_that_are_trained_on_are_left_alone() -> None:
    """Chosen once, not evicted as stale meanwhile, popped in the end; or put back."""

    async def check(client: Client) -> None:
        for name in ("a", "b", "c"):
            await put_group(client, name)
        version = [5]
        loop = RecoveryLoop(CapacityLedger(client, "p", 4), Selector(max_staleness=0), lambda: version[0])
        first = await loop.select(2)
        assert [one.group_id for one in first.chosen] == ["a", "b"]
        assert (await loop.select(2)).chosen == ()
        second = await loop.select(2, least=1)
        assert [one.group_id for one in second.chosen] == ["c"]
        loop.put_back(second.chosen)
        version[0] = 6
        await loop.sweep()
        assert (await groups(client), loop.removed) == (["a", "b"], {"stale": 1})
        assert loop.ledger.used == 2
        await loop.finish(first.chosen)
        assert (await groups(client), loop.removed, loop.ledger.used) == ([], {"stale": 1, "trained": 2}, 0)
        await put_group(client, "a", 6)
        assert [one.group_id for one in (await loop.select(1)).chosen] == ["a"]

    on_a_plane(check)


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_whose_training_met_an_outage_are_chosen_again_or_popped(backend: str) -> None:
    """An outage while training: they are trained on later. One after the journal was written: they are popped."""

    async def check(client: Client) -> None:
        journal: list[str] = []
        outages = ["train", "finish"]
        loop = loop_on(
            client,
            ledger=CapacityLedger(client, "p", 2),
            trained=lambda listed: [one for one in listed if one.group_id in journal],
        )

        async def train_pump() -> None:
            while True:
                await anyio.sleep(0.1)
                async with loop.reported():
                    selection = await loop.select(1)
                    for where in ("train", "finish"):
                        if selection.chosen and where in outages:
                            outages.remove(where)
                            raise DataPlaneUnavailable(where)
                        if where == "train":
                            journal.extend(one.group_id for one in selection.chosen)
                    await loop.finish(selection.chosen)

        await put_group(client, "a")
        await put_group(client, "b")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.run)
            tasks.start_soon(train_pump)
            with anyio.fail_after(300.0):
                await loop.ledger.reserve("c")
                await loop.ledger.reserve("d")
            tasks.cancel_scope.cancel()
        assert (sorted(journal), outages, await groups(client)) == (["a", "b"], [], [])
        assert loop.removed == {"trained": 2}

    on_a_plane(check, backend=backend)


@pytest.mark.parametrize("error", [ZeroDivisionError, None])
def test_a_block_that_does_not_end_well_puts_back_what_it_chose(error: type[Exception] | None) -> None:
    """An error of the caller's, a cancellation; not what another block has chosen, nor what a good one has."""

    async def check(client: Client) -> None:
        for name in ("a", "b", "c"):
            await put_group(client, name)
        loop = loop_on(client)
        loop.ledger.gate.open()
        async with loop.reported():
            await loop.select(1)
        with suppress(ZeroDivisionError), anyio.CancelScope() as scope:
            async with loop.reported():
                (mine,) = (await loop.select(1)).chosen
                (done,) = (await loop.select(1)).chosen
                await loop.finish([done])
                await put_group(client, done.group_id)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(loop.select, 1)
                if error is not None:
                    raise error
                scope.cancel()
                await anyio.sleep(1.0)
        assert mine.group_id == "b"
        assert {one.group_id for one in (await loop.select(3, least=1)).chosen} == {"b", "c"}

    on_a_plane(check)


def test_what_the_journal_has_is_popped_though_it_was_chosen() -> None:
    """A journalled group is popped and counted once, whether or not ``finish`` is called for it after the sweep."""

    async def check(client: Client) -> None:
        journal: list[str] = []
        loop = loop_on(client, trained=lambda listed: [one for one in listed if one.group_id in journal])
        await put_group(client, "a")
        chosen = (await loop.select(1)).chosen
        journal.append("a")
        await loop.sweep()
        assert (await groups(client), loop.removed, loop.ledger.used) == ([], {"trained": 1}, 0)
        await loop.finish(chosen)
        assert loop.removed == {"trained": 1}
        journal.clear()
        await put_group(client, "a")
        assert [one.group_id for one in (await loop.select(1)).chosen] == ["a"]

    on_a_plane(check)


def test_removals_spare_what_was_put_anew() -> None:
    """3a: between the listing and the removal a group is popped, and its ids live again."""

    async def check(client: Client) -> None:
        await put_group(client, "g", 1)
        loop = loop_on(client, trained=lambda listed: listed)
        listing = await loop.ledger.rebuild()
        await client.pop(["g_g0", "g_g1"], "p")
        await put_group(client, "g", 5)
        await loop._look(listing)
        assert await groups(client) == ["g"]
        loop = loop_on(client)
        await loop._look(listing)
        assert await groups(client) == ["g"]

    on_a_plane(check)


def test_owners_that_cannot_be_asked_about_keep_what_they_have() -> None:
    """What asks about processes may fail as they do; the story says so. Answers may be awaitable."""

    async def check(client: Client) -> None:
        await put_group(client, "a")
        await client.claim_meta("p", "train", ["x"], 2)
        state = ["fails"]

        async def alive(owner: str) -> bool:
            if state == ["fails"]:
                raise OSError("no route")
            return state == ["lives"]

        loop = loop_on(client, alive=alive, tasks=["train"])
        await loop.sweep()
        assert (loop.released, loop.unknown_owners) == (0, {client.owner: "OSError: no route"})
        state[:] = ["lives"]
        await loop.sweep()
        assert (loop.released, loop.unknown_owners) == (0, {})
        state[:] = ["dead"]
        await loop.sweep()
        assert (loop.released, await client.list_claims("p", "train")) == (1, [])

    on_a_plane(check)


def test_failed_rows_are_counted_apart() -> None:
    """They are neither trained on nor lost."""

    async def check(client: Client) -> None:
        async with GroupWriter(client, "p", "g", size=2, weight_version=5) as group:
            await group.put(["g_g0", "g_g1"], {"x": torch.zeros(2)})
            await group.fail("g_g2", "timed out")
        loop = loop_on(client)
        assert [one.group_id for one in (await loop.select(1)).chosen] == ["g"]
        assert (loop.failed_rows, loop.removed) == (1, {})

    async def run() -> None:
        async with stack(MemoryTransport()) as client:
            await client.register_partition("p", ["x"], 8, ["train"])
            await check(client)

    run_virtual(run)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tasks": "train"}, "tasks must be a sequence of strings, not 'train'"),
        ({"ping_timeout_s": 0}, "ping_timeout_s: must be a positive number, not 0"),
        ({"sweep_every_s": "5"}, "sweep_every_s: must be a positive number, not '5'"),
        ({"give_up_after_s": float("nan")}, "give_up_after_s: must be a positive number, not nan"),
        ({"settled_s": True}, "settled_s: must be a positive number, not True"),
        ({"backoff_cap_s": -1.0}, "backoff_cap_s: must be a positive number, not -1.0"),
        ({"alive": {"w0"}}, "alive: must be callable, not {'w0'}"),
        ({"version": 3}, "version: must be callable, not 3"),
        ({"version": None}, "version: must be callable, not None"),
        ({"declare": 3}, "declare: must be callable, not 3"),
        ({"trained": 3}, "trained: must be callable, not 3"),
        ({"clock": 3}, "clock: needs the methods now, time, sleep; 3 has no now"),
        ({"rng": 3}, "rng: needs the methods uniform, randrange; 3 has no uniform"),
        ({"backoff_base_s": -1.0}, "backoff_base_s: must be a positive number, not -1.0"),
        ({"on_event": "print"}, "on_event: must be callable, not 'print'"),
    ],
)
def test_an_argument_that_makes_no_sense_is_named(wrong: dict[str, Any], message: str) -> None:
    """At once, not at the first outage; a task alone is not read as a sequence of letters."""

    async def check(client: Client) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            RecoveryLoop(CapacityLedger(client, "p", 4), Selector(), **{"version": lambda: 5, **wrong})

    on_a_plane(check)


def test_its_defaults_are_those_of_the_page() -> None:
    """docs/recovery.md names some of the seconds."""
    defaults = {name: one.default for name, one in inspect.signature(RecoveryLoop).parameters.items()}
    assert {name: seconds for name, seconds in defaults.items() if name.endswith("_s")} == {
        "backoff_base_s": 0.5,
        "backoff_cap_s": 10.0,
        "ping_timeout_s": 5.0,
        "sweep_every_s": 5.0,
        "give_up_after_s": 600.0,
        "settled_s": 30.0,
    }


def test_an_outage_is_told_step_by_step() -> None:
    """The error, how long was waited, no shorter than the plane asked for, and what each job did."""

    async def check(client: Client) -> None:
        told: list[RecoveryStep] = []
        await put_group(client, "stale", 1)
        loop = loop_on(client, on_event=told.append, backoff_base_s=0.001, backoff_cap_s=0.001)
        assert (loop.failed_rows, loop.released, loop.removed, loop.unknown_owners) == (0, 0, {}, {})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.run)
            await loop.ledger.gate.wait()
            assert told[2].detail == {"removed": {"stale": 1}, "waiting": {}}
            told.clear()
            await anyio.sleep(100.0)
            assert loop.report(DataPlaneUnavailable("loading", retry_after_s=7.0))
            began = anyio.current_time()
            await loop.ledger.gate.wait()
            assert 7.0 <= anyio.current_time() - began < 7.5
            tasks.cancel_scope.cancel()
        fault, waited, *rest = told
        assert (fault.detail, fault.outage) == ({"error": "DataPlaneUnavailable: loading"}, 1)
        assert list(waited.detail) == ["waited_s"]
        assert 7.0 <= waited.detail["waited_s"] == round(waited.detail["waited_s"], 3) < 7.1
        assert [(str(step.event), step.detail) for step in rest] == [
            ("done", {}),
            ("done", {"used": 0, "capacity": 4}),
            ("done", {"removed": {}, "waiting": {}}),
            ("done", {"released": 0, "unknown_owners": {}}),
        ]
        assert loop.story[-len(told) :] == tuple(told)

    on_a_plane(check)


def test_a_refused_job_is_waited_for_as_long_as_the_plane_asks() -> None:
    """Not only the fault that began the outage."""
    plan = FaultPlan().on("ping").error(DataPlaneNotReady, "busy", attributes={"retry_after_s": 20.0}, times=1)

    async def check(client: Client) -> None:
        client.call_timeout_s = 1.0
        loop = loop_on(client, backoff_base_s=0.001, backoff_cap_s=0.001, ping_timeout_s=0.5)
        async with anyio.create_task_group() as tasks:
            began = anyio.current_time()
            tasks.start_soon(loop.run)
            await loop.ledger.gate.wait()
            assert 20.0 <= anyio.current_time() - began < 22.0
            tasks.cancel_scope.cancel()

    on_a_plane(check, plan)


def test_waits_stay_long_until_the_gate_was_open_for_settled_s() -> None:
    """An outage soon after another one begins with its longer wait."""

    async def waits(settled_s: float, client: Client) -> float:
        told: list[RecoveryStep] = []
        loop = loop_on(client, on_event=told.append, settled_s=settled_s, backoff_base_s=1.0, backoff_cap_s=1e3)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.run)
            for _ in range(8):
                await loop.ledger.gate.wait()
                await anyio.sleep(50.0)
                loop.report(DataPlaneUnavailable("away"))
            await loop.ledger.gate.wait()
            tasks.cancel_scope.cancel()
        return max(step.detail.get("waited_s", 0.0) for step in told)

    async def check(client: Client) -> None:
        assert await waits(40.0, client) < 1.0
        assert await waits(60.0, client) > 2.0

    on_a_plane(check)


def test_a_ping_takes_no_longer_than_it_may() -> None:
    """A silent plane is asked again after ``ping_timeout_s`` and the wait, within the bound of the recovery."""

    async def check(client: Client) -> None:
        await anyio.sleep(2.0)
        client.call_timeout_s = 500.0
        loop = loop_on(client, ping_timeout_s=3.0, backoff_base_s=0.001, backoff_cap_s=0.001, give_up_after_s=31.0)
        with pytest.raises(RecoveryGaveUp) as raised:
            await loop.run()
        pings = [line for line in raised.value.story if "pinging ->" in line]
        assert 10 <= len(pings) <= 12 + 20  # attempts of the layers end sooner
        assert loop.outage == 0
        assert not loop.ledger.gate.is_open

    on_a_plane(check, FaultPlan().silent(at_s=1.0))


def test_a_story_says_what_it_leaves_out() -> None:
    """Between its beginning and its end."""

    async def check(client: Client) -> None:
        loop = loop_on(client, give_up_after_s=9.0)
        machine = RecoveryMachine(Backoff(0.5, 10.0), random.Random(1), 0.0, give_up_after_s=9.0, story_steps=4)
        for _ in range(5):
            machine.handle(Event.FAILED, 1.0, {"error": "away"})
            machine.handle(Event.WAITED, 2.0)
        error = loop._gave_up(machine)
        assert len(error.story) == 5
        assert error.story[2] == "(6 steps are not shown)"
        assert [" waited" in line for line in error.story] == [False, True, False, False, True]

    on_a_plane(check)


def test_a_sweep_of_what_is_gone_goes_up_at_once() -> None:
    """A partition that was dropped is not waited for, nor is there an outage."""

    async def check(client: Client) -> None:
        loop = loop_on(client)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(expect, DataPlaneBadRequest, loop.run)
            await loop.ledger.gate.wait()
            await client.drop_partition("p")
        assert loop.outage == 0

    on_a_plane(check)


def test_claims_are_looked_at_where_it_was_told_to() -> None:
    """Of the tasks it was given, else of all of the partition; without ``alive`` none are."""

    async def check(client: Client) -> None:
        await client.register_partition("q", ["x"], 8, ["train", "score"], grpo_group_size=2)
        await client.put_samples(["g_g0", "g_g1"], "q", {"x": torch.zeros(2)}, [{"weight_version": 5}] * 2)
        await client.claim_meta("q", "score", ["x"], 2)
        for alive, tasks, left in (
            (None, None, 1),
            (lambda _: False, ["train"], 1),
            (lambda _: True, ["score"], 1),
            (lambda _: False, None, 0),
        ):
            loop = loop_on(client, ledger=CapacityLedger(client, "q", 4), alive=alive, tasks=tasks)
            await loop.sweep()
            assert (len(await client.list_claims("q", "score")), loop.released) == (left, 1 - left)

    on_a_plane(check)


def test_weight_fifo_waits_for_older_weights_that_are_being_made() -> None:
    """Their reservation says so, before there is a row."""

    async def check(client: Client) -> None:
        await put_group(client, "new", 5)
        loop = loop_on(client, selector=Selector("weight_fifo"))
        loop.ledger.gate.open()
        place = await loop.ledger.reserve("old", weight_version=4)
        assert (await loop.select(1)).chosen == ()
        await loop.ledger.release(place)
        assert [one.group_id for one in (await loop.select(1)).chosen] == ["new"]

    on_a_plane(check)


def test_what_was_removed_and_released_is_counted_over_all_sweeps() -> None:
    """Sums, not the newest numbers; a capability that is missing is not asked for."""

    async def check(client: Client) -> None:
        loop = loop_on(
            client, alive=lambda _: False, trained=lambda listed: [g for g in listed if g.weight_version == 5]
        )
        for sweep in (1, 2):
            await put_group(client, f"ahead{sweep}", 6)
            await put_group(client, f"t{sweep}")
            await put_group(client, f"u{sweep}")
            await put_group(client, f"stale{sweep}", 1)
            assert (await client.claim_meta("p", "train", ["x"], 2)).size == 2
            await loop.sweep()
            assert (loop.removed, loop.released) == ({"trained": 2 * sweep, "stale": sweep}, sweep)
            assert loop.ledger.used == sweep
            assert await client.list_claims("p", "train") == []

    on_a_plane(check)


def test_blocks_within_blocks_put_back_their_own() -> None:
    """The inner block's outage ends it alone; what was selected after a block ended belongs to none."""

    async def check(client: Client) -> None:
        for name in "abcd":
            await put_group(client, name)
        loop, other = loop_on(client), loop_on(client)
        for one in (loop, other):
            one.ledger.gate.open()
        with suppress(ZeroDivisionError):
            async with loop.reported():
                await loop.select(1)
                async with loop.reported():
                    await loop.select(1)
                    raise DataPlaneUnavailable("away")
                loop.ledger.gate.open()
                assert sorted(loop._training) == ["a"]
                async with other.reported():
                    await loop.select(1)
                assert sorted(loop._training) == ["a", "b"]
                raise ZeroDivisionError
        assert loop._training == {}
        await loop.select(1)
        with suppress(ZeroDivisionError):
            async with loop.reported():
                raise ZeroDivisionError
        assert sorted(loop._training) == ["a"]
        loop.put_back((await loop.select(2)).chosen)
        assert sorted(loop._training) == ["a"]

    on_a_plane(check)


def test_an_observer_that_raises_harms_nothing() -> None:
    """X6."""

    async def check(client: Client) -> None:
        loop = loop_on(client, on_event=lambda _: 1 // 0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(loop.run)
            await loop.ledger.gate.wait()
            tasks.cancel_scope.cancel()

    on_a_plane(check)


class Run:
    """A controller with pumps, killed and started again. What is left is asked by a client that meets no fault."""

    def __init__(self, client: Client, truth: Client, rng: random.Random) -> None:
        self.client, self.truth, self.rng = client, truth, rng
        self.version = 5
        self.journal: dict[str, int] = {}
        self.made = 0
        self.open = 0
        self.dead: set[str] = set()

    def trained(self, listed: Sequence[DataPlaneGroupMeta]) -> list[DataPlaneGroupMeta]:
        """Return what the journal has."""
        return [one for one in listed if one.group_id in self.journal]

    async def there(self) -> set[str]:
        """Return the groups that are being made or are in the plane."""
        return {g.tags[0].get("reservation_for", g.group_id) for g in await self.truth.list_metadata("p")}

    async def rollout(self, loop: RecoveryLoop) -> None:
        """Produce groups; now and then a worker fails, or dies in the middle."""
        while True:
            await anyio.sleep(self.rng.uniform(0.0, 2.0))
            self.made += 1
            name = f"r{self.made}"
            async with loop.reported():
                place = await loop.ledger.reserve(name, owner=f"worker-{name}", weight_version=self.version)
                assert len(await self.there()) <= 4
                fate = self.rng.random()
                if fate < 0.1:
                    self.dead.add(place.owner)
                    continue
                with suppress(ZeroDivisionError):
                    async with GroupWriter(
                        self.client,
                        "p",
                        name,
                        size=2,
                        weight_version=self.version,
                        reservation=place,
                        ledger=loop.ledger,
                    ) as group:
                        await group.put([f"{name}_g0"], {"x": torch.zeros(1)})
                        if fate < 0.2:
                            raise ZeroDivisionError
                        await group.put([f"{name}_g1"], {"x": torch.zeros(1)})

    async def train(self, loop: RecoveryLoop) -> None:
        """Train on what is chosen: journalled once, then popped."""
        while True:
            await anyio.sleep(self.rng.uniform(0.0, 2.0))
            async with loop.reported():
                selection = await loop.select(1)
                for one in selection.chosen:
                    assert one.group_id not in self.journal  # no group is trained twice
                    assert self.version - (one.weight_version or 0) in (0, 1)
                    self.journal[one.group_id] = self.version
                self.version += len(selection.chosen)
                if self.rng.random() < 0.3:
                    loop.put_back(selection.chosen)  # killed before the pop: the journal knows
                    continue
                await loop.finish(selection.chosen)

    async def controller(self, for_s: float) -> RecoveryLoop:
        """Run a controller from its start to its kill."""
        loop = RecoveryLoop(
            CapacityLedger(self.client, "p", 4, reservation_timeout_s=60.0),
            Selector(),
            lambda: self.version,
            trained=self.trained,
            alive=lambda owner: owner not in self.dead,
            rng=self.rng,
            sweep_every_s=3.0,
        )
        with anyio.move_on_after(for_s):
            async with anyio.create_task_group() as tasks:
                for task in (loop.run,):
                    tasks.start_soon(task)
                tasks.start_soon(self.rollout, loop)
                tasks.start_soon(self.train, loop)
        return loop


def play(kills: Sequence[float], seed: int, plan: FaultPlan) -> None:
    """Play a run; in the end a controller without faults trains what is left, and the account adds up."""

    async def run() -> None:
        transport = MemoryTransport()
        truth = stack(MemoryTransport(transport.attach_config(), bootstrap=False))
        async with faulty_stack(transport, plan, attempt_timeout_s=1.0, max_attempts=2) as client, truth:
            client.env.clock.time()  # virtual time begins: from now on wall time follows it
            await declare(truth)
            one = Run(client, truth, random.Random(seed))
            for for_s in kills:
                await one.controller(for_s)
            before = len(one.journal)
            calm = Run(truth, truth, one.rng)
            calm.__dict__ |= {**one.__dict__, "client": truth}
            loop = await calm.controller(100.0)  # longer than a reservation of a killed controller lasts
            assert len(calm.journal) > before + 3  # it goes on
            await loop.sweep()
            await loop.sweep()
            left = await calm.there()
            assert loop.ledger.used == len(left) <= 4
            assert not left.intersection(calm.journal)

    run_virtual(run)


PLANS = st.builds(
    lambda seed, p, at_s, for_s: (
        FaultPlan(seed=seed)
        .refuse(p=p, for_s=60.0)
        .lose_reply(p=p, for_s=60.0)
        .lose_request(p=p / 2, for_s=60.0)
        .silent(at_s=at_s, for_s=for_s)
    ),
    st.integers(0, 2**16),
    st.sampled_from([0.01, 0.05, 0.2]),
    st.floats(0.0, 60.0),
    st.floats(1.0, 60.0),
)


@settings(max_examples=4, phases=PHASES)
@given(kills=st.lists(st.floats(0.0, 20.0), max_size=3), seed=st.integers(0, 2**16), plan=PLANS)
def test_random_controllers_train_each_group_once(kills: list[float], seed: int, plan: FaultPlan) -> None:
    """Faults, outages, dead workers, kills of the controller: the capacity is kept, and no group is trained twice."""
    play(kills, seed, plan)


@pytest.mark.slow
@pytest.mark.timeout(6 * CONTROLLERS)
@settings(max_examples=CONTROLLERS, phases=PHASES)
@given(kills=st.lists(st.floats(0.0, 20.0), max_size=3), seed=st.integers(0, 2**16), plan=PLANS)
def test_hundreds_of_random_controllers(kills: list[float], seed: int, plan: FaultPlan) -> None:
    """The same for long."""
    play(kills, seed, plan)
