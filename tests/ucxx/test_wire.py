import asyncio
import contextlib
import os
import pickle
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from asyncdp.calls.answers import verify
from asyncdp.calls.slots import HostRef, ReadSlots, SlotRef
from asyncdp.errors import (
    CorruptPayload,
    DataPlaneBadRequest,
    DataPlaneClosed,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneReadError,
    DataPlaneUnavailable,
    DataPlaneWriteError,
    StaleSlotError,
)
from asyncdp.rows.block import Block
from asyncdp.transports.ucxx.client import connection as connections
from asyncdp.transports.ucxx.client.connection import Connection
from asyncdp.transports.ucxx.client.connection_pool import Pool
from asyncdp.transports.ucxx.host import session as session_module
from asyncdp.transports.ucxx.host.registration import HostReport, NoDirectory
from asyncdp.transports.ucxx.host.session import Session
from asyncdp.transports.ucxx.payload.blocks import packed
from asyncdp.transports.ucxx.payload.payload import Payload
from asyncdp.transports.ucxx.wire.failures import describe, restore
from asyncdp.transports.ucxx.wire.handshake import Secret
from asyncdp.transports.ucxx.wire.messages import (
    GREETING_BYTES,
    HEAD_BYTES,
    Ask,
    Challenge,
    Drop,
    Failed,
    Read,
    SlotRows,
    Welcome,
    WireError,
    Write,
    Written,
    pack_frame,
    unpack_body,
    unpack_head,
)
from tests.ucxx import segments
from tests.ucxx.hosts import SECRET, hosted, pool_of, put_over, ref_of
from tests.ucxx.segments import rows

pytestmark = pytest.mark.anyio


# -- frames


def test_a_message_comes_back_as_it_was() -> None:
    """Number, fields, nested references."""
    message = Read([("a", "b")], [SlotRows(1, 2, 0, 3, 4), SlotRows(5, 6, 0, 0, 0, [7, 9])], 11, 12)
    frame = pack_frame(message)
    assert unpack_head(frame[:HEAD_BYTES], 1 << 20) == len(frame) - HEAD_BYTES
    assert unpack_body(frame[HEAD_BYTES:]) == message


@given(st.binary(max_size=300))
@example(msgspec.msgpack.encode([7, [["a"]], [[-1, 0, 0, 0, 0]], 0, 0]))
@example(b"\x91" * 290)
def test_garbage_is_a_wire_error_never_a_crash(data: bytes) -> None:
    """Bodies, and heads: magic, version and length are checked before anything else."""
    with contextlib.suppress(WireError):
        unpack_body(data)
    if len(data) >= HEAD_BYTES:
        with contextlib.suppress(WireError):
            assert unpack_head(data[:HEAD_BYTES], 100) <= 100


@pytest.mark.parametrize(
    "err",
    [
        StaleSlotError("gone"),
        DataPlaneNotReady("full", retry_after_s=0.5),
        DataPlaneBadRequest("no"),
        CorruptPayload("bad"),
        DataPlaneWriteError("given up"),
    ],
    ids=lambda err: type(err).__name__,
)
def test_errors_keep_their_class(err: DataPlaneError) -> None:
    """Class, text, retry_after_s."""
    back = restore(*describe(err), host="h", port=3)
    assert type(back) is type(err)
    assert (back.message, back.retryable, back.host) == (err.message, err.retryable, "h")
    assert getattr(back, "retry_after_s", None) == getattr(err, "retry_after_s", None)


@pytest.mark.parametrize("told", [float("nan"), float("inf"), -5.0])
def test_a_time_to_wait_that_makes_no_sense_is_left_out(told: float) -> None:
    """Whatever a host says."""
    assert getattr(restore("DataPlaneNotReady", "full", told, host="h", port=3), "retry_after_s", 0) is None


def test_a_secret_shows_nowhere() -> None:
    """Not in its repr, and it does not pickle."""
    assert "hush" not in repr(Secret("hush")) + str(Secret("hush"))
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(Secret("hush"))


# -- a host and its clients, payload in frames


async def test_rows_travel_in_the_frame_where_they_are_small() -> None:
    """Put and get over the control stream alone: one round trip each, verified by the reader."""
    async with hosted() as host:
        here = ref_of(host.report())
        with pool_of() as pool:
            async with pool.use("127.0.0.1", here.ports[0]) as connection:
                refs = await put_over(connection, here, "op", rows(3, fill=4.0))
            async with pool.use("127.0.0.1", here.ports[1]) as connection:
                result = verify(await connection.read(here, refs), ReadSlots(here, refs))
    assert not result.errors
    values: Any = result.parts[0].block.columns["a"].values  # type: ignore[attr-defined]
    assert torch.equal(values, torch.full((3, 8), 4.0))


async def test_one_status_per_slot() -> None:
    """Of many slots in one request some are stale, some full of other rows: the rest comes."""
    async with hosted(rows_per_slot=1, checksum=True) as host:
        here = ref_of(host.report())
        with pool_of() as pool:
            async with pool.use("127.0.0.1", here.ports[0]) as connection:
                refs = await put_over(connection, here, "op", rows(4))
                assert await connection.drop(here, [(refs[1].slot, refs[1].generation, [0], ())]) == 1
                assert await connection.drop(here, [(refs[1].slot, refs[1].generation, [0], ())]) == 0
                wrong = SlotRef(here, refs[2].slot, refs[2].generation, ("b",), [0], [2])
                asked = (refs[0], refs[1], wrong, refs[3])
                result = verify(await connection.read(here, asked), ReadSlots(here, asked))
                assert {at: type(err) for at, err in result.errors.items()} == {1: StaleSlotError, 2: CorruptPayload}
                assert result.parts[0].refs == (0, 3)
                assert result.parts[0].checksums is not None
                other = HostRef(here.id, here.epoch + 1, here.ports)
                with pytest.raises(StaleSlotError, match="epoch"):
                    await connection.read(other, refs)
                assert not connection.spent


async def test_a_full_host_says_so_before_any_payload_is_sent() -> None:
    """raise: at once. wait: when space comes back within the time. A given-up put gives its space back."""
    async with hosted(on_full="raise") as host:
        here = ref_of(host.report())
        with pool_of() as pool:
            async with pool.use("127.0.0.1", here.ports[0]) as connection:
                first = await connection.reserve(here, "a", ("a",), [3 << 20], 0, ttl_s=60, wait_s=9, lane=False)
                await connection.reserve(here, "b", ("a",), [3 << 20], 0, ttl_s=60, wait_s=9, lane=False)
                with pytest.raises(DataPlaneNotReady):
                    await connection.reserve(here, "c", ("a",), [3 << 20], 0, ttl_s=60, wait_s=9, lane=False)
                assert await connection.abort("a", idle=True) == 0
                again = await connection.reserve(here, "d", ("a",), [3 << 20], 0, ttl_s=60, wait_s=9, lane=False)
                assert again.grants[0][0] == first.grants[0][0]
                with pytest.raises(DataPlaneWriteError, match="given up"):
                    await connection.reserve(here, "a", ("a",), [1], 0, ttl_s=60, wait_s=0, lane=False)
                with pytest.raises(DataPlaneBadRequest, match="max_slot_bytes"):
                    await connection.reserve(here, "e", ("a",), [5 << 20], 0, ttl_s=60, wait_s=0, lane=False)
    async with hosted(on_full="wait") as host:
        here = ref_of(host.report())
        with pool_of() as pool:
            async with pool.use("127.0.0.1", here.ports[0]) as one, pool.use("127.0.0.1", here.ports[0]) as two:
                for op in "ab":
                    await one.reserve(here, op, ("a",), [3 << 20], 0, ttl_s=60, wait_s=9, lane=False)
                waiting = asyncio.ensure_future(
                    two.reserve(here, "c", ("a",), [3 << 20], 0, ttl_s=60, wait_s=9, lane=False)
                )
                await asyncio.sleep(0.05)
                assert not waiting.done()
                await one.abort("a", idle=True)
                assert (await waiting).grants


async def test_a_write_that_does_not_fit_or_is_corrupt_changes_nothing() -> None:
    """Sizes beyond the reservation, another put's slot, a wrong checksum: an error, and the host serves on."""
    async with hosted() as host:
        here = ref_of(host.report())
        with pool_of() as pool:
            async with pool.use("127.0.0.1", here.ports[0]) as connection:
                granted = await connection.reserve(here, "op", ("a",), [32], 0, ttl_s=60, wait_s=0, lane=False)
                slot, generation, _, _ = granted.grants[0]
                ref = SlotRef(here, slot, generation, ("a",), [0], [0])
                with pytest.raises(DataPlaneBadRequest):
                    await connection.write(here, "op", [ref], rows(1, 4096))
                with pytest.raises(DataPlaneWriteError):
                    await connection.write(here, "other", [ref], rows(1))
                for size, sums in ((2, None), (0, [1])):
                    bad = Write("op", [(slot, generation, size)], here.epoch, sums, bytes(size))
                    await connection._control.send(bad)
                    assert type(await connection._control.receive()).__name__ == "Failed"
                granted = await connection.reserve(here, "sum", ("a",), [32], 0, ttl_s=60, wait_s=0, lane=False)
                other, again, _, _ = granted.grants[0]
                data = packed(rows(1)).tobytes()
                for wrong in (1, 0):
                    crc = Payload.read(np.frombuffer(data, np.uint8)).checksum() + wrong
                    message = Write("sum", [(other, again, len(data))], here.epoch, [crc], data)
                    await connection._control.send(message)
                    assert type(await connection._control.receive()).__name__ == ("Failed" if wrong else "Written")
                for fill in (1.0, 2.0):  # the second is a repeat whose answer was lost: the first one counts
                    await connection.write(here, "op", [ref], rows(1, fill=fill), checksum=True)
                values: Any = (await connection.read(here, [ref])).parts[0].block.columns["a"]
                assert (values.values == 1.0).all()
                assert (await connection.ask())["ready"] == 2


async def test_a_wrong_secret_stays_outside() -> None:
    """A clear error that does not ask to be tried again; the other way round too."""
    async with hosted() as host:
        with pool_of(secret=Secret("another")) as pool, pytest.raises(DataPlaneUnavailable, match="not this host's"):
            async with pool.use("127.0.0.1", host.report().ports[0]):
                pass
        with pool_of() as pool:
            async with pool.use("127.0.0.1", host.report().ports[0]) as connection:
                assert await connection.ask()


async def test_a_host_that_does_not_know_the_secret_is_not_believed() -> None:
    """Who stands in for a host has to prove it as well; until then it is the port that is at fault."""

    async def fake(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(pack_frame(Challenge(b"n" * 32)))
        await reader.read(100)
        writer.write(pack_frame(Welcome(b"p" * 32, "h", 1, "", "", 0, b"t" * 16, 1.0, 0)))
        await reader.read()
        writer.close()
        gone.set()

    gone = asyncio.Event()
    server = await asyncio.start_server(fake, "127.0.0.1", 0)
    with pool_of() as pool, pytest.raises(DataPlaneUnavailable, match="does not know the secret") as raised:
        async with pool.use("127.0.0.1", server.sockets[0].getsockname()[1]):
            pass
    assert (raised.value.retryable, raised.value.blames_port, raised.value.refused) == (True, True, True)
    await gone.wait()
    server.close()


@pytest.mark.parametrize("code", ["DataPlaneBadRequest", "StaleSlotError", "CorruptPayload", "anything"])
async def test_what_a_peer_says_before_its_proof_is_an_error_of_its_port(code: str) -> None:
    """A process at the port of a host that has ended neither ends a run nor writes into its log."""

    async def fake(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(pack_frame(Challenge(b"n" * 32)))
        await reader.read(100)
        writer.write(pack_frame(Failed(code, "\x1b[31mthe disk is on fire\nERROR a line\u2028" + "x" * 800)))
        await reader.read()
        writer.close()
        gone.set()

    gone = asyncio.Event()
    server = await asyncio.start_server(fake, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pool_of() as pool, pytest.raises(DataPlaneUnavailable, match=r"refuses this client.*on fire") as raised:
        async with pool.use("127.0.0.1", port):
            pass
    assert (raised.value.retryable, raised.value.blames_port, raised.value.port) == (True, True, port)
    assert str(raised.value).isprintable()
    await gone.wait()
    server.close()


def test_texts_of_hosts_are_on_one_line() -> None:
    """Also after the proof: what a host passes on may come from others."""
    for code in ("DataPlaneBadRequest", "DataPlaneNotReady", "unknown"):
        err = restore(code, "\x1b[2Jfield \u202eevil\n" + "x" * 5000, 0.5, host="h", port=1)
        assert err.message.isprintable()
        assert len(err.message) < 1100


async def strange(port: int, data: bytes, *, greeted: bool = False) -> bytes:
    """Say something at a port and return what it answers until it closes the connection."""
    if greeted:
        connection = await Connection.open(None, SECRET, ("127.0.0.1", port), None, None)  # type: ignore[arg-type]
        connection._control._transport.write(data)
        async with asyncio.timeout(60):
            while not connection.spent:  # noqa: ASYNC110 - what is looked at has no event
                await asyncio.sleep(0.005)
        return b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    if len(data) < HEAD_BYTES:
        writer.write_eof()
    async with asyncio.timeout(60):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "noise": bytes(range(256)) * 20,
    "half a head": b"ADP",
    "huge": b"ADPW\x01\0\0\0\xff\xff\xff\xff",
    "beyond the greeting": b"ADPW\x01\0\0\0" + (GREETING_BYTES + 1).to_bytes(4, "little"),
    "another version": b"ADPW\x09\0\0\0\x01\0\0\0\x90",
    "no message": b"ADPW\x01\0\0\0\x01\0\0\0\xc1",
    "out of turn": pack_frame(Ask()),
}


@pytest.mark.parametrize("greeted", [False, True])
@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_at_a_port_closes_the_connection_and_the_host_serves_on(name: str, *, greeted: bool) -> None:
    """S15: garbage, half a frame, huge lengths, before and after the handshake."""
    data = GARBAGE[name]
    if greeted and name in ("half a head", "beyond the greeting", "out of turn"):
        data = pack_frame(Challenge(b"n" * 32))
    async with hosted() as host:
        port = host.report().ports[0]
        await strange(port, data, greeted=greeted)
        with pool_of() as pool:
            async with pool.use("127.0.0.1", port) as connection:
                assert (await connection.ask())["ready"] == 0


async def test_a_request_for_what_cannot_be_is_refused_or_closed() -> None:
    """Slots, generations, rows and field lists beyond all: an error per slot or a closed connection, never a crash."""
    far = 1 << 61
    requests: list[Read | Write | Drop] = [
        Read([("a",)], [SlotRows(far, far, 0, 0, 1)], 0, 0),
        Read([("a",)], [SlotRows(0, 0, 5, 0, 1)], 0, 0),
        Read([("a",)], [SlotRows(0, 0, 0, 1 << 39, 1 << 39)], 0, 0),
        Write("op", [(far, far, 1 << 39)], 0),
    ]
    async with hosted() as host:
        here = ref_of(host.report())
        with pool_of() as pool:
            async with pool.use("127.0.0.1", here.ports[0]) as connection:
                (ref,) = await put_over(connection, here, "op", rows(1))
            requests.append(Read([("a",)], [SlotRows(ref.slot, ref.generation, 0, 0, 1 << 39)], 0, 0))
            requests.append(Drop([("a",)], [SlotRows(ref.slot, ref.generation, 0, 1, 1 << 39)], 0))
            for request in requests:
                for epoch in (0, here.epoch):
                    async with pool.use("127.0.0.1", here.ports[0]) as connection:
                        await connection._control.send(msgspec.structs.replace(request, epoch=epoch))
                        with contextlib.suppress(ConnectionResetError):
                            await connection._control.receive()
                        connection.spend()
            async with pool.use("127.0.0.1", here.ports[0]) as connection:
                assert (await connection.ask())["ready"] == 1


async def test_a_write_that_names_a_slot_twice_is_refused() -> None:
    """Nothing of it is written, and the slot can still be."""
    block = rows(1)
    async with hosted() as host:
        here = ref_of(host.report())
        with pool_of() as pool:
            async with pool.use("127.0.0.1", here.ports[0]) as connection:
                sizes = block.row_nbytes().tolist()
                granted = await connection.reserve(here, "op", ("a",), sizes, 0, ttl_s=60, wait_s=0, lane=False)
                ((slot, generation, _, _),) = granted.grants
                data = packed(block).tobytes()
                named = (slot, generation, len(data))
                await connection._control.send(Write("op", [named, named], here.epoch, None, data + data))
                assert isinstance(await connection._control.receive(), Failed)
                assert host.service.table.counts()["ready"] == 0
                await connection._control.send(Write("op", [named], here.epoch, None, data))
                assert isinstance(await connection._control.receive(), Written)


async def test_a_mute_stranger_is_closed_after_a_while() -> None:
    """It may take ``greeting_s`` to prove that it knows the secret."""
    async with hosted(greeting_s=0.05) as host:
        reader, writer = await asyncio.open_connection("127.0.0.1", host.report().ports[0])
        async with asyncio.timeout(60):
            assert b"ADPW" in await reader.read()
        writer.close()


async def test_a_slot_is_used_again_only_when_every_receive_into_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection broke in mid-write and the put was given up: UCX may still be writing."""
    loop = asyncio.get_running_loop()
    operations: Any = [SimpleNamespace(ended=loop.create_future()) for _ in range(2)]

    broken = SimpleNamespace(operations=operations, receive=AsyncMock(side_effect=ConnectionResetError))
    monkeypatch.setattr(session_module, "Incoming", lambda *_: broken)
    async with hosted() as host:
        table = host.service.table
        (grant,) = table.reserve("op", ("a",), [32], 0, 1e18)
        control: Any = SimpleNamespace(peer="", lost=True, send=AsyncMock())
        engine: Any = SimpleNamespace(next_tag=lambda: 1, abandon=lambda _: None)
        session = Session(control, host.service, engine, None, SECRET, 0)
        session._endpoint = object()
        with pytest.raises(ConnectionResetError):
            await session._write(Write("op", [(grant.slot, grant.generation, 64)], host.arena.epoch))
        assert table.abort("op", 0.0) == 1
        for operation in operations:
            assert table.slots
            operation.ended.set_result(None)
            await asyncio.sleep(0)
        assert not table.slots


# -- the pool


async def test_a_connection_is_used_again_and_never_by_two() -> None:
    """Exclusive while lent; the one used last comes first."""
    async with hosted() as host:
        port = host.report().ports[0]
        with pool_of() as pool:
            async with pool.use("127.0.0.1", port) as one, pool.use("127.0.0.1", port) as two:
                assert one is not two
            async with pool.use("127.0.0.1", port) as again:
                assert again is one
            assert (pool.opened, pool.idle) == (2, 2)


async def test_a_connection_that_idled_for_long_is_replaced_quietly() -> None:
    """S8: before the host's limit, and after the host closed it: no error, no blame."""
    async with hosted(idle_s=0.2) as host:
        port = host.report().ports[0]
        with pool_of() as pool:
            async with pool.use("127.0.0.1", port) as one:
                await one.ask()
            one.used_at -= 0.11
            async with pool.use("127.0.0.1", port) as two:
                assert two is not one
                await two.ask()
            assert one.spent
            async with asyncio.timeout(60):
                while not two.spent:  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.01)
            async with pool.use("127.0.0.1", port) as three:
                assert await three.ask()


async def test_connections_of_a_burst_are_closed_once_they_idled_for_long() -> None:
    """At the next use of another one, whatever the host does; those that were used since stay."""
    async with hosted(idle_s=100.0) as host:
        port = host.report().ports[0]
        with pool_of() as pool:
            async with AsyncExitStack() as burst:
                made = [await burst.enter_async_context(pool.use("127.0.0.1", port)) for _ in range(4)]
            last = made[0]  # they came back in reverse order
            for one in made[2:]:
                one.used_at -= 51.0
            async with pool.use("127.0.0.1", port) as taken:
                assert taken is last
                await taken.ask()
            assert [one.spent for one in made] == [False, False, True, True]
            assert pool.idle == 2


@asynccontextmanager
async def one_that_waits() -> AsyncIterator[tuple[HostRef, Pool, asyncio.Task[None]]]:
    """Yield a full host, clients of it, and a task that waits until the host has space."""
    async with hosted(on_full="wait", drain_s=0.2) as host:
        here = ref_of(host.report())
        with pool_of() as pool:
            async with pool.use("127.0.0.1", here.ports[0]) as connection:
                for op in "ab":
                    await connection.reserve(here, op, ("a",), [3 << 20], 0, ttl_s=60, wait_s=0, lane=False)

            async def waits() -> None:
                async with pool.use("127.0.0.1", here.ports[0]) as mine:
                    await mine.reserve(here, "c", ("a",), [3 << 20], 0, ttl_s=60, wait_s=9, lane=False)

            task = asyncio.ensure_future(waits())
            await asyncio.sleep(0.05)
            yield here, pool, task


async def test_a_cancelled_request_spends_its_connection() -> None:
    """T2: the next request gets its own reply, on another connection."""
    async with one_that_waits() as (here, pool, task):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pool.idle == 0
        async with pool.use("127.0.0.1", here.ports[0]) as connection:
            assert (await connection.ask())["writing"] == 2


async def test_all_places_are_usable_after_many_cancels() -> None:
    """T6: 60 tasks cancelled at random on a pool of 2."""
    rng = random.Random(5)
    async with hosted() as host:
        port = host.report().ports[0]
        with pool_of(per_port=2) as pool:

            async def asks() -> None:
                async with pool.use("127.0.0.1", port) as mine:
                    for _ in range(3):
                        await mine.ask()

            tasks = [asyncio.ensure_future(asks()) for _ in range(60)]
            for task in tasks:
                await asyncio.sleep(rng.random() * 0.002)
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            async with pool.use("127.0.0.1", port) as one, pool.use("127.0.0.1", port) as two:
                assert await one.ask()
                assert await two.ask()


async def test_a_pool_that_is_closed_under_a_call_says_so() -> None:
    """X2: who waits gets a clean error at once, and so does who comes later."""
    async with one_that_waits() as (here, pool, task):
        pool.close()
        pool.close()
        async with asyncio.timeout(60):
            (err,) = await asyncio.gather(task, return_exceptions=True)
        assert type(err) is DataPlaneClosed
        with pytest.raises(DataPlaneClosed):
            async with pool.use("127.0.0.1", here.ports[0]):
                pass


async def test_nobody_there_is_unavailable_at_once() -> None:
    """Refused, or a host that ended meanwhile."""
    with pool_of() as pool:
        async with hosted() as host:
            port = host.report().ports[0]
            async with pool.use("127.0.0.1", port) as connection:
                await connection.ask()
                await host.stop()
                with pytest.raises(DataPlaneUnavailable):
                    await connection.ask()
        with pytest.raises(DataPlaneUnavailable) as caught:
            async with pool.use("127.0.0.1", port):
                pass
        assert (caught.value.retryable, caught.value.blames_port) == (True, True)


async def test_a_taken_port_is_left_out_and_the_real_ones_are_told() -> None:
    """S10."""
    blocker = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    taken = blocker.sockets[0].getsockname()[1]
    async with hosted(first_port=taken, ports=2) as host:
        ports = host.report().ports
        assert taken not in ports
        assert len(set(ports)) == 2
        with pool_of() as pool:
            for port in ports:
                async with pool.use("127.0.0.1", port) as connection:
                    assert await connection.ask()
    blocker.close()


async def test_nothing_is_left_of_a_host() -> None:
    """Its arena goes with it where it is not to be kept."""
    before = segments.leftovers()
    async with hosted() as host:
        name = host.arena.name
    assert not (Path("/dev/shm") / name).exists()
    assert segments.leftovers() == before


async def test_a_start_that_fails_leaves_the_adopted_rows_to_the_next() -> None:
    """U8: the host is killed, and while it starts again nobody answers at the directory: its rows stay."""

    class Away(NoDirectory):
        """Does not answer; is told that hosts leave."""

        def __init__(self) -> None:
            super().__init__()
            self.left: list[str] = []

        async def beat(self, report: HostReport) -> float:
            raise DataPlaneUnavailable("the directory does not answer")

        async def leave(self, host_id: str, epoch: int) -> None:
            self.left.append(host_id)

    keys: dict[str, Any] = {"host_id": f"again-{os.getpid()}", "adopt": True}
    async with hosted(keep_arena=True, **keys) as host:
        here = ref_of(host.report())
        with pool_of() as pool:
            async with pool.use("127.0.0.1", here.ports[0]) as connection:
                (ref,) = await put_over(connection, here, "op", rows(1))
    away = Away()
    with pytest.raises(DataPlaneUnavailable):
        async with hosted(away, **keys):
            pass
    assert not away.left
    async with hosted(**keys) as host:
        again = ref_of(host.report())
        assert again.epoch == here.epoch
        with pool_of() as pool:
            async with pool.use("127.0.0.1", again.ports[0]) as connection:
                assert not (await connection.read(again, (ref,))).errors


@pytest.mark.parametrize("kind", [CorruptPayload, DataPlaneReadError])
async def test_a_payload_that_cannot_be_built_does_not_fail_the_others(
    monkeypatch: pytest.MonkeyPatch, kind: type[DataPlaneReadError]
) -> None:
    """Its refs have the error, as damaged ones; the others of the read have their rows, and the connection stays."""
    build = connections.block_of

    def fails_once(payload: Any, codec: Any) -> Any:
        if payload.layout.metas[0].name == "bad":
            raise kind("of a dtype that nobody knows", field="bad")
        return build(payload, codec)

    monkeypatch.setattr(connections, "block_of", fails_once)
    async with hosted(inline_bytes=1 << 20) as host:
        here = ref_of(host.report())
        bad = Block.from_fields({"bad": torch.zeros(1, 4)}, 1)
        with pool_of() as pool:
            async with pool.use("127.0.0.1", here.ports[0]) as connection:
                refs: list[SlotRef] = []
                for at in range(3):
                    refs += await put_over(connection, here, f"{at}", bad if at == 1 else rows(1))
                result = verify(await connection.read(here, refs), ReadSlots(here, tuple(refs)))
                assert sorted(at for part in result.parts for at in part.refs) == [0, 2]
                assert {at: type(err) for at, err in result.errors.items()} == {1: kind}
                told = result.errors[1]
                assert (told.host, told.field, told.retryable) == (here.id, "bad", kind is CorruptPayload)
                assert not connection.spent
