from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch
from tensordict import TensorDict

from asyncdp import DataPlaneNotReady, DataPlaneTimeout, DataPlaneUnavailable, MemoryTransport, RowHandle
from asyncdp.calls import GetSamples, ListMetadata, Ping, PutSamples
from asyncdp.calls.slots import HostRef, Locate, Located, Part, ReadResult, ReadSlots, SlotRef
from asyncdp.rows.block import Block
from asyncdp.testing import Request, pair, run_virtual

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])
HOST = HostRef("host-a", 1, (1, 2))


def located(call: Request, *ids: str) -> Located:
    """Say that the samples lie in one slot of host-a."""
    ref = SlotRef(HOST, 0, 1, call.fields, range(len(ids)), range(len(ids)))
    block = Block.from_fields({name: torch.zeros(1) for name in call.fields}, 1)
    return Located((ref,), {}, [RowHandle(1)] * len(ids), block.observed())


def read(*values: float) -> ReadResult:
    """Answer a read of field x."""
    block = Block.from_fields({"x": torch.tensor(values)}, len(values))
    return ReadResult((Part((0,), block, (block.nbytes,), block.schema_hash()),))


def virtual(fn: Callable[..., Any]) -> Callable[[str], None]:
    """Run a test on both loops in virtual time."""

    def test(backend: str) -> None:
        run_virtual(fn, backend)

    test.__doc__ = fn.__doc__
    return BACKENDS(test)


async def into(results: list[Any], call: Any) -> None:
    """Await a call; keep what came of it."""
    try:
        results.append(await call)
    except Exception as err:  # noqa: BLE001 - looked at by the test
        results.append(err)


@virtual
async def test_the_test_plays_the_backend() -> None:
    """Each request comes out of next(), with its arguments, and gets the answer that the test gives."""
    results: list[Any] = []
    async with pair() as (client, backend), anyio.create_task_group() as group:
        group.start_soon(into, results, client.get_samples(["a", "b"], "p", ["x"]))
        call = await backend.next(Locate)
        assert (call.verb, call.sample_ids, call.partition_id) == ("get_samples", ("a", "b"), "p")
        call.reply(located(call, "a", "b"))
        call = await backend.next(ReadSlots)
        assert (call.host, len(call.refs)) == (HOST, 1)
        call.reply(read(1.0, 2.0))
    assert results[0]["x"].tolist() == [1.0, 2.0]


@virtual
async def test_without_slots_whole_verbs_come() -> None:
    """With slots=False the backend is asked as the user asked."""
    results: list[Any] = []
    async with pair(slots=False) as (client, backend), anyio.create_task_group() as group:
        group.start_soon(into, results, client.get_samples(["a"], "p", ["x"]))
        (await backend.next(GetSamples)).reply(TensorDict({"x": torch.ones(1)}, batch_size=[1]))
    assert results[0]["x"].tolist() == [1.0]


@virtual
async def test_raw_and_typed_errors_come_up() -> None:
    """fail() raises what it is given: raw without layers, typed with them."""
    for layers, raised in (((), ConnectionResetError), (None, DataPlaneUnavailable)):
        results: list[Any] = []
        async with pair(slots=False, layers=layers) as (client, backend), anyio.create_task_group() as group:
            group.start_soon(into, results, client.list_metadata("p"))
            for _ in range(1 if layers == () else 4):
                (await backend.next(ListMetadata)).fail(ConnectionResetError("the directory died"))
        assert type(results[0]) is raised


@virtual
async def test_a_dropped_request_is_never_answered() -> None:
    """drop() is silence: the attempt runs into its time, the next one is asked; settings bring the default layers."""
    results: list[Any] = []
    async with pair(attempt_timeout_s=1.0) as (client, backend), anyio.create_task_group() as group:
        began = anyio.current_time()
        group.start_soon(into, results, client.ping(timeout_s=30))
        first = await backend.next(Ping)
        first.drop()
        await first.abandoned()
        assert anyio.current_time() - began == pytest.approx(1.0)
        second = await backend.next(Ping)
        assert (first.ctx.attempt, second.ctx.attempt) == (1, 2)
        first_again = pytest.raises(AssertionError, match="answered already")
        with first_again:
            first.reply()
        second.reply()
    assert results == [None]


@virtual
async def test_a_call_that_nobody_answers_ends_by_its_time() -> None:
    """Without layers too, by its timeout_s or by the pair's: nobody has to set a limit of his own."""
    async with pair(slots=False, call_timeout_s=7.0) as (client, backend), anyio.create_task_group() as group:
        for timeout_s in (2.0, None):
            results: list[Any] = []
            began = anyio.current_time()
            group.start_soon(into, results, client.put_samples(["a"], "p", {"x": torch.ones(1)}, timeout_s=timeout_s))
            call = await backend.next(PutSamples)
            call.drop()
            await call.abandoned(timeout_s=60)
            await anyio.sleep(0.01)
            assert anyio.current_time() - began == pytest.approx(timeout_s or 7.0, abs=0.1)
            assert isinstance(results[0], DataPlaneTimeout)
            assert results[0].ambiguous


@virtual
async def test_an_answer_that_comes_too_late_is_lost() -> None:
    """After the caller was cancelled, reply() does nothing, and the request counts as given up."""
    async with pair() as (client, backend):
        with anyio.move_on_after(1.0):
            await client.ping()
        call = backend._waiting[0]
        assert call.given_up
        call.reply()
        with pytest.raises(AssertionError, match="no Ping came within 2 s; what came before: nothing"):
            await backend.next(Ping, timeout_s=2)


@virtual
async def test_another_kind_of_request_is_named() -> None:
    """A wrong kind fails with what came, of which verb, and what stands behind it."""
    async with pair() as (client, backend), anyio.create_task_group() as group:
        group.start_soon(into, [], client.get_samples(["a"], "p", ["x"]))
        await anyio.sleep(0.1)
        group.start_soon(into, [], client.ping())
        await anyio.sleep(0.1)
        with pytest.raises(AssertionError) as caught:
            await backend.next(ReadSlots)
        text = str(caught.value)
        assert text.startswith("the next request is Locate(sample_ids=('a',), partition_id='p', fields=('x',))")
        assert "of get_samples, where ReadSlots was expected; behind it: Ping() of ping" in text
        with pytest.raises(AssertionError, match="nobody expected Locate"):
            backend.nothing()
        assert [request.verb for request in backend.waiting] == ["get_samples", "ping"]
        (await backend.next()).fail(DataPlaneNotReady("later"))
        (await backend.next()).reply()
        backend.nothing()


@virtual
async def test_next_says_what_came_before() -> None:
    """The bound is the caller's; the message tells the requests that were seen."""
    async with pair() as (client, backend), anyio.create_task_group() as group:
        group.start_soon(into, [], client.ping())
        (await backend.next(Ping)).reply()
        began = anyio.current_time()
        with pytest.raises(
            AssertionError, match=r"no Locate or ReadSlots came within 3 s; .* before: Ping\(\) of ping"
        ):
            await backend.next(Locate, ReadSlots, timeout_s=3)
        assert anyio.current_time() - began == pytest.approx(3.0)


async def left_open(results: list[Any], error: Exception | None, **settings: Any) -> None:
    """Leave a pair with one request taken and one not; maybe by an error."""
    async with anyio.create_task_group() as group, pair(**settings) as (client, backend):
        group.start_soon(into, results, client.ping())
        await backend.next(Ping)
        group.start_soon(into, results, client.depth("p"))
        await anyio.sleep(0.1)
        if error is not None:
            raise error


@virtual
async def test_requests_without_an_answer_are_reported_at_the_end() -> None:
    """Closed over an unanswered request: its caller gets DataPlaneClosed, the test an error that names it."""
    for settings in ({}, {"layers": None}):
        results: list[Any] = []
        with pytest.raises(ExceptionGroup) as caught:
            await left_open(results, None, **settings)
        assert caught.group_contains(
            AssertionError, match=r"2 request\(s\) were never answered: Depth.*\(not taken\); Ping.*\(taken\)"
        )
        assert [type(result).__name__ for result in results] == ["DataPlaneClosed"] * 2


@virtual
async def test_what_failed_first_is_what_is_reported() -> None:
    """An error in the body is not hidden by requests that it left unanswered."""
    with pytest.raises(ExceptionGroup) as caught:
        await left_open([], LookupError("gone"))
    assert [str(err) for err in caught.value.exceptions] == ["gone"]


@virtual
async def test_given_up_and_dropped_requests_are_no_debt() -> None:
    """Who timed out is not waited for; a request that was dropped on purpose neither, even at close."""
    async with anyio.create_task_group() as group, pair() as (client, backend):
        with anyio.move_on_after(1.0):
            await client.ping()
        group.start_soon(into, [], client.depth("p"))
        await anyio.sleep(0.1)
        (await backend.next()).drop()


@virtual
async def test_a_real_transport_answers_the_rest() -> None:
    """only= picks what comes to the test; forward() hands a request to the transport behind."""
    results: list[Any] = []
    made = pair(MemoryTransport(), only=[ReadSlots], attempt_timeout_s=1.0)
    async with made as (client, backend), anyio.create_task_group() as group:
        await client.register_partition("p", ["x"], 4, ["t"])
        await client.put_samples(["a"], "p", {"x": torch.ones(1)})
        group.start_soon(into, results, client.get_samples(["a"], "p", ["x"]))
        silent = await backend.next(ReadSlots)
        silent.drop()
        other = await backend.next(ReadSlots)
        assert other.port != silent.port
        other.forward()
    assert results[0]["x"].tolist() == [1.0]
    assert backend.taken == [silent, other]


def test_what_makes_no_sense_is_refused() -> None:
    """Only without a transport, an unknown setting, a forward to nowhere."""
    with pytest.raises(ValueError, match="only: "):
        pair(only=[ReadSlots])
    with pytest.raises(ValueError, match="attempt_timeout: no layer has this setting"):
        pair(attempt_timeout=1.0)

    async def forward() -> None:
        async with pair() as (client, backend), anyio.create_task_group() as group:
            group.start_soon(into, [], client.ping())
            call = await backend.next()
            with pytest.raises(ValueError, match="forward: there is nothing behind"):
                call.forward()
            with pytest.raises(AttributeError, match="neither a request nor Ping has 'sample_ids'"):
                _ = call.sample_ids
            call.fail(DataPlaneTimeout("late"))

    run_virtual(forward)


def test_a_transport_with_slots_answers_whole_verbs() -> None:
    """With slots=False the verbs come to the test whole, and what is forwarded is answered whole, by a transport."""

    async def main() -> None:
        async with pair(MemoryTransport(), slots=False, only=[PutSamples, GetSamples]) as (client, backend):
            await client.register_partition("p", ["x"], 1, ["t"])
            async with anyio.create_task_group() as group:
                group.start_soon(client.put_samples, ["a"], "p", {"x": torch.ones(1)})
                (await backend.next(PutSamples)).forward()
            got: list[Any] = []

            async def read() -> None:
                got.append(await client.get_samples(["a"], "p", ["x"]))

            async with anyio.create_task_group() as group:
                group.start_soon(read)
                (await backend.next(GetSamples)).forward()
            assert got[0]["x"].tolist() == [1.0]
            assert (await client.claim_meta("p", "t", ["x"], 1)).sample_ids == ["a"]

    run_virtual(main)
