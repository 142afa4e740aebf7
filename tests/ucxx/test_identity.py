"""What a client may give up, write and keep reserved is its own, whatever it says of itself or guesses."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncdp.calls.slots import SlotRef
from asyncdp.errors import DataPlaneError, DataPlaneNotReady, DataPlaneWriteError
from asyncdp.transports.ucxx.client import connection as connections
from asyncdp.transports.ucxx.host import session as sessions
from asyncdp.transports.ucxx.slots.header import Outcome, write_outcome
from asyncdp.transports.ucxx.slots.writer_process import Process, holds_socket, this_process
from tests.ucxx.hosts import hosted, pool_of, put_over, ref_of
from tests.ucxx.segments import rows

pytestmark = pytest.mark.anyio
LOCAL = "127.0.0.1"


def process_of(pid: int) -> Process:
    """Return the life of a process."""
    return Process(pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]))


async def _reserve(connection: Any, here: Any, op_id: str, nbytes: int = 64, *, lane: bool = False) -> Any:
    return await connection.reserve(here, op_id, ("a",), [nbytes], 0, ttl_s=60.0, wait_s=0.0, lane=lane)


@pytest.fixture
def other() -> Iterator[Process]:
    """Another process, which lives."""
    asleep = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process_of(asleep.pid)
    asleep.communicate(b"\n")


async def test_space_is_reserved_in_the_name_of_who_has_the_connection(
    other: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A7: who says that it is another process, one that never ends, gets no slot for the lane in its name."""
    async with hosted() as host:
        here = ref_of(host.report())
        with pool_of() as pool:
            async with pool.use(LOCAL, here.ports[0]) as connection:
                assert (await _reserve(connection, here, "mine", lane=True)).lane
        monkeypatch.setattr(connections, "this_process", lambda: other)
        with pool_of() as pool:
            async with pool.use(LOCAL, here.ports[0]) as connection:
                assert not (await _reserve(connection, here, "theirs", lane=True)).lane
        writers = {slot.header.writer for slot in host.service.table.slots.values()}
        assert writers == {this_process(), None}


async def test_a_process_is_looked_up_once_for_each_client(other: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """A7: its other connections are known by what the client shows; that proves nothing of another process."""
    looked: list[Process] = []

    def look(process: Process, address: tuple[str, int]) -> bool:
        looked.append(process)
        return holds_socket(process, address)

    monkeypatch.setattr(sessions, "holds_socket", look)
    async with hosted(ports=3) as host:
        here = ref_of(host.report())
        with pool_of() as pool:
            for number, port in enumerate(here.ports[:2]):
                async with pool.use(LOCAL, port) as connection:
                    assert (await _reserve(connection, here, f"mine{number}", lane=True)).lane
            assert looked == [this_process()]
            monkeypatch.setattr(connections, "this_process", lambda: other)
            async with pool.use(LOCAL, here.ports[2]) as connection:
                assert not (await _reserve(connection, here, "theirs", lane=True)).lane
            assert looked == [this_process(), other]


def test_a_socket_is_held_by_its_process_alone() -> None:
    """By the kernel's own tables, for IPv4 and IPv6; what cannot be found is nobody's."""
    for address, family in ((LOCAL, socket.AF_INET), ("::1", socket.AF_INET6)):
        try:
            server = socket.create_server((address, 0), family=family)
        except OSError:
            continue
        with server, socket.create_connection(server.getsockname()[:2]) as client:
            name = client.getsockname()[:2]
            assert holds_socket(this_process(), name)
            assert not holds_socket(Process(this_process().pid, 1), name)
            assert not holds_socket(this_process(), (name[0], 1))
    assert not holds_socket(this_process(), ("", 0))
    assert not holds_socket(Process(2**22 + 5, 1), (LOCAL, os.getpid() % 65536))


async def test_a_put_is_given_up_and_written_by_its_client_alone() -> None:
    """Who guesses the op_id of another client, or its slots, ends nothing and writes nothing of it."""
    async with hosted(ports=1) as host:
        here = ref_of(host.report())
        with pool_of() as pool, pool_of() as other:
            async with pool.use(LOCAL, here.ports[0]) as mine, other.use(LOCAL, here.ports[0]) as theirs:
                block = rows(1)
                granted = await _reserve(mine, here, "op", int(block.row_nbytes()[0]))
                slot, generation, _, _ = granted.grants[0]
                ref = SlotRef(here, slot, generation, ("a",), range(1), range(1))
                assert (await _reserve(theirs, here, "op")).grants[0][0] != slot
                assert await theirs.abort("op", idle=True) == 0
                with pytest.raises((DataPlaneWriteError, DataPlaneError)):
                    await theirs.write(here, "op", [ref], rows(1, fill=7.0))
                await mine.write(here, "op", [ref], block)
                result = await mine.read(here, [ref])
                assert not result.errors
                assert result.parts[0].block.columns["a"].values.eq(1.0).all()  # type: ignore[attr-defined]
            async with pool.use(LOCAL, here.ports[0]) as again:  # all connections of a client are that client
                await put_over(again, here, "op2", block)
                assert await again.abort("op2", idle=True) == 0


async def test_one_client_cannot_keep_all_others_out() -> None:
    """A7: beside what it has reserved and not written, a client gets no more than its share; others do."""
    async with hosted(writing_share=0.5, max_slot_bytes=8 << 20) as host:
        here = ref_of(host.report())
        with pool_of() as pool, pool_of() as other:
            async with pool.use(LOCAL, here.ports[0]) as greedy, other.use(LOCAL, here.ports[0]) as modest:
                await _reserve(greedy, here, "one", 3 << 20)
                for number in range(3):
                    with pytest.raises(DataPlaneNotReady, match="writing_share"):
                        await _reserve(greedy, here, f"more{number}", 3 << 20)
                await _reserve(greedy, here, "one", 3 << 20)  # the same again is no more
                await _reserve(modest, here, "one", 3 << 20)
                await greedy.abort("one", idle=True)
                await _reserve(greedy, here, "two", 3 << 20)


@pytest.mark.parametrize("on_full", ["raise", "overwrite_oldest"])
async def test_what_a_lane_writer_has_finished_is_no_unwritten_space(on_full: str) -> None:
    """Its share is for what it has not written, however short ago it wrote the rest."""
    async with hosted(writing_share=0.5, max_slot_bytes=8 << 20, on_full=on_full) as host:
        here = ref_of(host.report())
        with pool_of() as pool:
            async with pool.use(LOCAL, here.ports[0]) as connection:
                for number in range(2):
                    granted = await _reserve(connection, here, f"op{number}", 3 << 20, lane=True)
                    ((slot, generation, _, _),) = granted.grants
                    write_outcome(host.service.table.arena, slot, generation, Outcome.STOPPED)


async def test_no_put_may_publish_for_longer_than_an_hour() -> None:
    """A7: a ttl of seven days is one hour: what is never written comes back then."""
    async with hosted() as host:
        here = ref_of(host.report())
        with pool_of() as pool:
            async with pool.use(LOCAL, here.ports[0]) as connection:
                await connection.reserve(here, "op", ("a",), [64], 0, ttl_s=7 * 86400.0, wait_s=0.0, lane=False)
        (slot,) = host.service.table.slots.values()
        assert slot.header.not_after <= host.clock() + 3600.0
        assert host.service.table.sweep(host.clock() + 3601.0) == 1


async def test_who_was_not_told_where_rows_lie_can_neither_read_nor_drop_them() -> None:
    """Slots are few, but a generation cannot be guessed: not by small numbers, not from that of an earlier use."""
    async with hosted(ports=1, arena_bytes=1 << 20, max_slot_bytes=1 << 20, unit_bytes=128 << 10) as host:
        here = ref_of(host.report())
        known: list[int] = []
        with pool_of() as pool, pool_of() as other:
            async with pool.use(LOCAL, here.ports[0]) as mine, other.use(LOCAL, here.ports[0]) as theirs:
                for number in range(4):
                    (ref,) = await put_over(mine, here, f"op{number}", rows(1))
                    known.append(ref.generation)
                    near = {old + step for old in known[:-1] for step in range(-1000, 1000) if old + step >= 0}
                    guesses = [*range(4000), *near]
                    cells = [(ref.slot, guess, range(1), ()) for guess in guesses]
                    assert await theirs.drop(here, cells) == 0
                    refs = [SlotRef(here, ref.slot, guess, ("a",), range(1), range(1)) for guess in guesses]
                    assert len((await theirs.read(here, refs)).errors) == len(guesses)
                    assert not (await mine.read(here, [ref])).errors
                    assert await mine.drop(here, [(ref.slot, ref.generation, range(1), ())]) == 1
