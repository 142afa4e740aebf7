"""Promises 10 and 11: every call ends in time, and a cancelled one leaves nothing behind."""

from __future__ import annotations

import os
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest
import torch

from asyncdp import (
    DataPlaneBadRequest,
    DataPlaneClosed,
    DataPlaneTimeout,
    MemoryTransport,
    PortRotation,
    layers_of,
    stack,
)
from asyncdp.slots import Reserve, Resolve, WriteSlots
from tests.contract.faults import CLAIM, CLEAR, GET, PUT, Hold, Straggle
from tests.contract.rig import at_once, declare, until
from tests.contract.same import check_same
from tests.contract.verbs import MUTATIONS, VERBS

if TYPE_CHECKING:
    from asyncdp.client import BaseClient
    from tests.contract.rig import Rig

pytestmark = pytest.mark.anyio

LIMIT_S = 0.15
#: One tick of the loop, on a machine that is busy with other things.
TICK_S = 0.5


async def fill(rig: Rig, n: int = 8) -> None:
    """Put ``x``, the number of each row, one put per row."""
    await declare(rig.client)
    for i in range(n):
        await rig.client.put_samples(["a" if not i else f"s{i}"], "p", {"x": torch.tensor([float(i)])})


def tasks() -> int:
    """Count the tasks of this loop."""
    return len(anyio.get_running_tasks())


# --- time


@pytest.mark.parametrize("verb", VERBS)
async def test_a_backend_that_never_answers_hangs_no_verb(rig: Rig, verb: str) -> None:
    """T1, promise 10: DataPlaneTimeout in time, ambiguous where it changes something; the loop ticks on."""
    hang = Hold(times=10_000)
    client = await rig.attach(hang)
    await fill(rig, 1)
    late: list[float] = []
    over = anyio.Event()

    async def tick() -> None:
        while not over.is_set():
            began = time.monotonic()
            await anyio.sleep(0.005)
            late.append(time.monotonic() - began)

    async def call() -> None:
        try:
            await VERBS[verb](client, LIMIT_S)
        finally:
            over.set()

    began = time.monotonic()
    err, _ = await at_once(call(), tick())
    took = time.monotonic() - began
    hang.times = 0
    hang.go.set()
    assert isinstance(err, DataPlaneTimeout)
    assert 0.9 * LIMIT_S <= took <= LIMIT_S + TICK_S
    assert max(late) < TICK_S
    assert (err.op, err.retryable) == (verb, False)
    whole_puts = not rig.client.get_capabilities().slot_writes
    assert err.ambiguous == (verb in MUTATIONS or (verb == "put_samples" and whole_puts))
    assert isinstance(err, TimeoutError)
    assert err.elapsed_s == pytest.approx(took, abs=TICK_S)


@pytest.mark.parametrize("verb", VERBS)
async def test_no_time_at_all_is_a_timeout(rig: Rig, verb: str) -> None:
    """timeout_s=0 is a call like any other, with no time: it never hangs and never half-happens."""
    await fill(rig, 1)
    with anyio.fail_after(2):
        (result,) = await at_once(VERBS[verb](rig.client, 0))
    assert isinstance(result, DataPlaneTimeout) or not isinstance(result, Exception)
    assert (await rig.client.describe("p")).size <= 2


async def test_endless_time_is_time(rig: Rig) -> None:
    """timeout_s=inf is allowed on every kind of call."""
    await fill(rig, 2)
    await rig.client.put_samples(["b"], "p", {"x": torch.zeros(1)}, timeout_s=float("inf"))
    assert (await rig.client.claim_meta("p", "train", ["x"], 3, timeout_s=float("inf"))).size == 3
    await rig.client.get_samples(["a", "b"], "p", ["x"], timeout_s=float("inf"))
    await rig.client.clear_samples(["b"], "p", timeout_s=float("inf"))


async def test_one_slow_answer_costs_an_attempt_not_the_call(rig: Rig) -> None:
    """An attempt that outlives its time is given up; the next one is asked, and answers."""
    rig.need("slot_addressable")
    hold = Hold(GET)
    client = await rig.attach(hold, settings={"attempt_timeout_s": 0.05})
    await fill(rig)
    with anyio.fail_after(3):
        check_same((await client.get_samples(["s3"], "p", ["x"]))["x"], torch.tensor([3.0]))
    assert hold.struck == 1


async def test_retries_stay_within_the_calls_time(rig: Rig) -> None:
    """T10: each attempt, round and pause lives inside the one deadline of the call."""
    client = await rig.attach(Hold(GET, times=10_000), settings={"attempt_timeout_s": 0.02, "backoff_base_s": 0.05})
    await fill(rig)
    began = time.monotonic()
    with pytest.raises(DataPlaneTimeout):
        await client.get_samples(["s1", "s2"], "p", ["x"], timeout_s=LIMIT_S)
    assert time.monotonic() - began <= LIMIT_S + TICK_S


async def test_a_reply_that_is_there_is_returned_though_the_loop_was_blocked(rig: Rig) -> None:
    """T8: the loop is blocked beyond the deadline just after the reply came: the reply."""
    hold = Hold(GET, after=True)
    client = await rig.attach(hold)
    await fill(rig, 1)

    async def block() -> None:
        await hold.holds()
        hold.go.set()
        time.sleep(0.3)  # noqa: ASYNC251 - that is the point

    got, _ = await at_once(client.get_samples(["a"], "p", ["x"], timeout_s=0.2), block())
    check_same(got["x"], torch.tensor([0.0]))


async def test_the_default_timeout_is_the_configs(rig: Rig) -> None:
    """call_timeout_s of the config bounds a call that says nothing."""
    client = await rig.attach(Hold(GET, times=99), call_timeout_s=LIMIT_S)
    await fill(rig, 1)
    began = time.monotonic()
    with pytest.raises(DataPlaneTimeout):
        await client.get_samples(["a"], "p", ["x"])
    assert time.monotonic() - began <= LIMIT_S + TICK_S


# --- cancellation


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "release_claim"])
async def test_a_cancelled_call_leaves_nothing_and_the_next_gets_its_own_reply(
    rig: Rig, verb: str, *, after: bool
) -> None:
    """T2, promise 11: no task, slot, permit stays; the same client goes on at once."""
    hold = Hold(after=after)
    client = await rig.attach(hold)
    await fill(rig, 3)
    before = tasks()
    await hold.cut(VERBS[verb](client, 60))
    assert tasks() == before
    got = await client.get_samples(["s2", "s1"], "p", ["x"], timeout_s=5)
    check_same(got["x"], torch.tensor([2.0, 1.0]))
    await client.put_samples(["b"], "p", {"x": torch.ones(1)}, timeout_s=5)
    await client.close()
    assert not rig.leftovers()
    assert len(client.env.ledger) == 0


async def test_of_many_cancelled_calls_none_disturbs_the_others(rig: Rig) -> None:
    """T2, T6: 200 reads cancelled at random; every reply is its own; every port and slot is free afterwards."""
    await fill(rig)
    rng = random.Random(1)
    client = rig.mate
    wrong: list[Any] = []

    async def read(i: int, wait_s: float) -> None:
        name = "a" if not i else f"s{i}"
        with anyio.move_on_after(wait_s):
            got = await client.get_samples([name], "p", ["x"])
            if float(got["x"]) != i:
                wrong.append((i, got["x"]))

    async with anyio.create_task_group() as group:
        for _ in range(200):
            group.start_soon(read, rng.randrange(8), rng.choice([0, 0.0005, 0.001, 0.002, 5]))
    assert not wrong
    assert not rig.leftovers()
    for layer in layers_of(client):
        if isinstance(layer, PortRotation):
            ports = layer.ports(client.env.clock.now())
            assert not [port for port, state in ports.items() if state.in_flight]
    check_same((await client.get_samples(["s7"], "p", ["x"]))["x"], torch.tensor([7.0]))


@pytest.mark.parametrize("step", [Reserve, WriteSlots, PUT], ids=["reserve", "write", "publish"])
async def test_puts_cancelled_at_random_leave_no_slot(rig: Rig, step: Any) -> None:
    """T6: after fifty cancelled puts and one more, nothing is reserved and each id is whole or absent."""
    rig.need("slot_writes", "mutation_dedup")
    await declare(rig.client, "x", "y")
    rng = random.Random(2)
    client = await rig.attach(Hold(step, times=25, after=True))

    async def put(i: int) -> None:
        with anyio.move_on_after(rng.choice([0, 0.001, 0.003])):
            data = {"x": torch.full((2,), float(i)), "y": torch.full((2, 2), float(i))}
            await client.put_samples([f"a{i}", f"b{i}"], "p", data)

    async with anyio.create_task_group() as group:
        for i in range(50):
            group.start_soon(put, i)
    await client.clear_samples(["nobody"], "p")
    await client.close()
    assert not rig.leftovers()
    there = {key for group_ in await rig.client.list_metadata("p") for key in group_.keys}
    assert all((f"a{i}" in there) == (f"b{i}" in there) for i in range(50))
    for i in range(50):
        if f"a{i}" in there:
            got = await rig.client.get_samples([f"a{i}", f"b{i}"], "p", ["x", "y"])
            check_same(got["y"], torch.full((2, 2), float(i)))


async def test_a_cancel_during_clean_up_waits_for_no_io(rig: Rig) -> None:
    """T7: cancelled while an earlier cancelled put is being settled: at once, and the clean-up is not forgotten."""
    rig.need("mutation_dedup")
    late, hold = Straggle(PUT), Hold(Resolve, times=2)
    client = await rig.attach(late, hold)
    await declare(client)
    for fault in (late, hold, hold):
        began = time.monotonic()
        await fault.cut(client.put_samples(["a"], "p", {"x": torch.zeros(1)}))
        assert time.monotonic() - began < TICK_S
    hold.go.set()
    await client.put_samples(["a"], "p", {"x": torch.ones(1)})
    assert len(client.env.ledger) == 0 or not rig.leftovers()
    check_same((await rig.client.get_samples(["a"], "p", ["x"]))["x"], torch.ones(1))


# --- close


async def test_close_is_idempotent(rig: Rig) -> None:
    """X2: twice, and from two tasks at once."""
    client = await rig.attach()
    await client.ping()
    assert await at_once(client.close(), client.close()) == [None, None]
    await client.close()
    async with await rig.attach() as again:
        await again.ping()
        await again.close()


@pytest.mark.parametrize("verb", VERBS)
async def test_a_closed_client_says_so(rig: Rig, verb: str) -> None:
    """X2: use after close is DataPlaneClosed, at once, naming the verb."""
    await fill(rig, 1)
    await rig.mate.close()
    with pytest.raises(DataPlaneClosed) as caught:
        await VERBS[verb](rig.mate, 5)
    assert (caught.value.op, caught.value.retryable, caught.value.ambiguous) == (verb, False, False)


@pytest.mark.parametrize("kinds", [CLAIM, GET, PUT, CLEAR, ()], ids=["claim", "read", "publish", "clear", "any"])
@pytest.mark.parametrize("verb", ["claim_meta", "get_samples", "put_samples", "clear_samples"])
async def test_closing_under_a_call_ends_it_promptly(rig: Rig, verb: str, kinds: Any) -> None:
    """X2: whatever it waits for, the call raises DataPlaneClosed, and nothing of it is left in the plane."""
    hold = Hold(*kinds, times=9)
    client = await rig.attach(hold)
    await fill(rig, 1)
    ended: list[Any] = []

    async def call() -> None:
        ended.extend(await at_once(VERBS[verb](client, 60)))

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        with anyio.move_on_after(0.02):
            await hold.holds()
        began = time.monotonic()
        hold.times = 0
        await client.close()
        await until(lambda: ended)
        assert time.monotonic() - began < 2 * TICK_S
    if hold.struck:
        assert isinstance(ended[0], DataPlaneClosed)
        assert ended[0].op == verb
    assert not rig.leftovers()
    assert len(client.env.ledger) == 0
    await rig.client.ping()
    assert await rig.client.list_claims("p", "train") == [] or not hold.struck


async def test_close_while_a_claim_waits_in_the_backend(rig: Rig) -> None:
    """X2: a claim that waits for samples raises DataPlaneClosed, promptly."""
    await declare(rig.client)

    async def close() -> None:
        await anyio.sleep(0.02)
        await rig.mate.close()

    began = time.monotonic()
    claimed, _ = await at_once(rig.mate.claim_meta("p", "train", ["x"], 1, timeout_s=60), close())
    assert isinstance(claimed, DataPlaneClosed)
    assert time.monotonic() - began < 2 * TICK_S
    await rig.client.put_samples(["a"], "p", {"x": torch.zeros(1)})
    assert (await rig.client.claim_meta("p", "train", ["x"], 1, blocking=False)).sample_ids == ["a"]


async def test_close_while_a_retry_pauses(rig: Rig) -> None:
    """X2: a call that waits for its next attempt raises DataPlaneClosed, promptly."""
    client = await rig.attach(Hold(GET, times=99), settings={"attempt_timeout_s": 0.01, "backoff_base_s": 2.0})
    await fill(rig, 1)

    async def close() -> None:
        await anyio.sleep(0.1)
        await client.close()

    began = time.monotonic()
    got, _ = await at_once(client.get_samples(["a"], "p", ["x"]), close())
    assert isinstance(got, DataPlaneClosed)
    assert time.monotonic() - began < 0.1 + 2 * TICK_S


async def test_a_close_that_cannot_settle_is_bounded(rig: Rig) -> None:
    """Promise 11: close() ends within its limit though the plane never answers, and the client stays closed."""
    rig.need("mutation_dedup")
    late, hang = Straggle(CLEAR), Hold(Resolve, times=99)
    client = await rig.attach(late, hang, settings={"close_timeout_s": 0.1})
    await declare(client)
    await late.cut(client.clear_samples(["a"], "p"))
    began = time.monotonic()
    await client.close()
    assert 0.05 < time.monotonic() - began < 0.1 + TICK_S
    for debt in client.env.ledger:
        client.env.ledger.paid(debt)
    with pytest.raises(DataPlaneClosed):
        await client.ping()


async def test_a_cancelled_close_still_ends_the_plane(rig: Rig) -> None:
    """T7: an owner whose close is cancelled while it settles leaves no plane behind."""
    rig.need("mutation_dedup")
    late, hang = Straggle(CLEAR), Hold(Resolve, times=99)
    owner = await rig.open(late, hang)
    worker = await rig.attach(to=owner)
    await declare(owner)
    await late.cut(owner.clear_samples(["a"], "p"))
    with anyio.move_on_after(0.01) as scope:
        await owner.close()
    assert scope.cancelled_caught
    (problem,) = await at_once(worker.ping(timeout_s=1))
    assert isinstance(problem, Exception)
    for debt in owner.env.ledger:
        owner.env.ledger.paid(debt)
    hang.go.set()


# --- loops, threads, processes


def _fresh() -> BaseClient:
    return stack(MemoryTransport())


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_one_client_in_one_loop_after_another(backend: str) -> None:
    """T9: two event loops, one after the other: works."""
    client = _fresh()
    anyio.run(lambda: declare(client), backend=backend)
    anyio.run(lambda: client.put_samples(["a"], "p", {"x": torch.zeros(1)}), backend=backend)
    assert anyio.run(lambda: client.depth("p"), backend=backend) == 1
    anyio.run(client.close, backend=backend)


def test_one_client_in_two_threads_says_so() -> None:
    """T9: used by a second loop while a call of the first is under way: DataPlaneBadRequest; afterwards it works."""
    client = _fresh()
    waiting, problems = threading.Event(), []

    async def first() -> None:
        await declare(client)
        async with anyio.create_task_group() as group:
            group.start_soon(claim)
            await anyio.sleep(0.02)
            waiting.set()
            await anyio.to_thread.run_sync(second.join)
            group.cancel_scope.cancel()

    async def claim() -> None:
        await client.claim_meta("p", "train", ["x"], 1)

    def use() -> None:
        waiting.wait(5)
        try:
            anyio.run(client.ping)
        except DataPlaneBadRequest as err:
            problems.append(err)

    second = threading.Thread(target=use)
    second.start()
    anyio.run(first)
    assert len(problems) == 1
    assert "thread" in str(problems[0])
    anyio.run(client.ping)
    anyio.run(client.close)


def test_clients_of_two_threads_share_a_plane() -> None:
    """T9: one client per loop and thread: puts of one wake the waiting claim of the other."""
    client = _fresh()
    anyio.run(lambda: declare(client))
    mate = stack(MemoryTransport(client.attach_config(), bootstrap=False))
    got: list[str] = []

    def consume() -> None:
        async def claim() -> None:
            for _ in range(20):
                got.extend((await mate.claim_meta("p", "train", ["x"], 1, timeout_s=9)).sample_ids)

        anyio.run(claim)

    async def produce() -> None:
        for i in range(20):
            await client.put_samples([f"s{i}"], "p", {"x": torch.zeros(1)})

    thread = threading.Thread(target=consume)
    thread.start()
    anyio.run(produce)
    thread.join(9)
    assert got == [f"s{i}" for i in range(20)]
    anyio.run(client.close)


def test_many_threads_consume_one_plane_exactly_once() -> None:
    """T9, C4: four threads, each with its own loop and client, produce and consume; each sample is claimed once."""
    client = _fresh()
    anyio.run(lambda: declare(client))
    config, got, problems = client.attach_config(), [], []

    async def work(number: int) -> None:
        mine = stack(MemoryTransport(config, bootstrap=False))
        for i in range(30):
            await mine.put_samples([f"{number}-{i}"], "p", {"x": torch.full((1,), float(i))})
            meta = await mine.claim_meta("p", "train", ["x"], 1, timeout_s=9)
            data = await mine.get_data(meta)
            got.append((meta.sample_ids[0], float(data["x"])))
        await mine.close()

    def run(number: int) -> None:
        try:
            anyio.run(work, number)
        except BaseException as err:  # noqa: BLE001 - looked at below
            problems.append(err)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not problems
    assert sorted(got) == sorted((f"{n}-{i}", float(i)) for n in range(4) for i in range(30))
    anyio.run(client.close)


def test_a_loop_that_died_with_a_waiting_claim_harms_nobody() -> None:
    """X3: a loop that was closed without a word leaves a waiter behind; other clients' puts go on."""
    import asyncio

    client = _fresh()
    anyio.run(lambda: declare(client))
    mate = stack(MemoryTransport(client.attach_config(), bootstrap=False))
    loop = asyncio.new_event_loop()
    task = loop.create_task(mate.claim_meta("p", "train", ["x"], 1, timeout_s=60))
    loop.run_until_complete(asyncio.sleep(0.02))
    task._log_destroy_pending = False
    loop.close()
    anyio.run(lambda: client.put_samples(["a"], "p", {"x": torch.zeros(1)}))
    assert anyio.run(lambda: client.depth("p")) == 1
    anyio.run(client.close)


def test_a_forked_child_says_so() -> None:
    """T9: after fork the child's use of the parent's client is DataPlaneBadRequest; the parent's goes on."""
    client = _fresh()
    anyio.run(client.ping)
    child = os.fork()
    if not child:
        code = 1
        try:
            anyio.run(client.ping)
        except DataPlaneBadRequest as err:
            code = 0 if "fork" in str(err) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    anyio.run(client.ping)
    anyio.run(client.close)
