"""A slot host and a client, each with a peer that knows the secret and says anything."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, get_args

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncdp.calls.slots import HostRef, SlotRef
from asyncdp.errors import DataPlaneError, DataPlaneUnsupported
from asyncdp.process.buffer_pool import BufferPool
from asyncdp.transports.ucxx.client.connection import Connection
from asyncdp.transports.ucxx.host.registration import NoDirectory
from asyncdp.transports.ucxx.host.service import Service
from asyncdp.transports.ucxx.host.session import Session
from asyncdp.transports.ucxx.payload.blocks import packed
from asyncdp.transports.ucxx.payload.objects import MsgpackCodec
from asyncdp.transports.ucxx.payload.payload import Payload
from asyncdp.transports.ucxx.slots.table import SlotTable
from asyncdp.transports.ucxx.wire.control import Control
from asyncdp.transports.ucxx.wire.handshake import Secret
from asyncdp.transports.ucxx.wire.messages import (
    Abort,
    Answer,
    Ask,
    Challenge,
    Done,
    Drop,
    Failed,
    Granted,
    HostFacts,
    Message,
    PartHead,
    Read,
    Reserve,
    Rows,
    SlotRows,
    Tie,
    Welcome,
    Write,
    Written,
    pack_frame,
)
from tests.fuzz.memory_limit import little_memory, ran_out
from tests.fuzz.peers import line
from tests.fuzz.readable import readable
from tests.fuzz.scale import examples, steps
from tests.fuzz.strategies import EDGES, damaged, mostly, values_of
from tests.ucxx import segments
from tests.ucxx.hosts import settings as host_settings
from tests.ucxx.segments import rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytest.importorskip("msgpack", reason="needs the extra ucxx")
CODEC = MsgpackCodec()
SECRET = Secret("a secret for tests")
MESSAGES = st.one_of(*map(values_of, get_args(Message)))
FRAMES = MESSAGES.map(pack_frame)


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    with little_memory():
        yield


# --- a host and what it is asked


SLOTS = st.sampled_from([0, 1, 2, 3]) | st.sampled_from(EDGES)
REFS = st.lists(
    values_of(SlotRows, slot=SLOTS, generation=st.sampled_from([0, 1, 2, 3]), fields=st.sampled_from([0, 0, 0, 1, 9])),
    max_size=3,
)
NAMES = st.lists(st.sampled_from([("a",), ("b",), ("a", "b"), ()]), max_size=2)
OPS = st.sampled_from(["op-1", "op-2", "op-3"])
EPOCHS = st.sampled_from([7, 7, 7, 7, 0, 8])
SIZES = st.lists(st.sampled_from([0, 1, 32, 32, 64, 5000, 1 << 20, (1 << 40) - 1]), max_size=4)
INLINE = st.none() | st.binary(max_size=64) | st.sampled_from([packed(rows(1)).tobytes(), packed(rows(2)).tobytes()])


@st.composite
def writes(draw: st.DrawFn) -> Write:
    """A write, often of bytes that fit what it says."""
    inline = draw(INLINE)
    size = draw(st.sampled_from(EDGES[:12])) if inline is None else len(inline)
    slots = [(draw(SLOTS), draw(st.sampled_from([1, 1, 2, 3])), size)]
    if draw(st.integers(0, 3)) == 0:
        slots += slots[:1] if draw(st.booleans()) else [(draw(SLOTS), 1, draw(st.sampled_from([0, 64])))]
    sums = draw(st.none() | st.none() | st.lists(st.integers(0, 1 << 32), max_size=2))
    return Write(draw(OPS), slots, draw(EPOCHS), sums, inline)


USUAL = st.one_of(
    values_of(Read, fields=NAMES, refs=REFS, epoch=EPOCHS),
    values_of(Reserve, op_id=OPS, fields=st.sampled_from([("a",), ("a", "b"), ()]), sizes=SIZES, epoch=EPOCHS),
    values_of(Reserve, op_id=OPS, fields=st.just(("a",)), sizes=st.just([32, 32]), epoch=st.just(7)),
    writes(),
    values_of(Abort, op_id=OPS),
    values_of(Drop, fields=NAMES, refs=REFS, epoch=EPOCHS),
    st.builds(Ask),
    st.builds(Tie),
)
REQUESTS = mostly(USUAL, MESSAGES)


async def serve(table: SlotTable, requests: list[Message], noise: bytes) -> Callable[[str], str]:
    """Be a client that knows the secret, and ask; returns under which names the host keeps this client's puts."""
    chosen = host_settings(idle_s=0.2, greeting_s=30.0, on_full="raise", max_reply_bytes=1 << 20)
    service = Service(table, chosen, NoDirectory(), BufferPool())
    control = Control()
    wire = line(control)
    session = Session(control, service, None, None, SECRET, 0)
    task = asyncio.ensure_future(session.run())
    challenge = await wire.answer(0)
    assert isinstance(challenge, Challenge)
    nonce = b"n" * 32
    proof = SECRET.proof(b"client", challenge.nonce, nonce)
    control.data_received(pack_frame(Answer(nonce, proof)))
    assert isinstance(await wire.answer(1), Welcome)
    for request in requests:
        known = len(wire.sent)
        if not wire.ended:
            control.data_received(pack_frame(request))
            await wire.answer(known)
    if noise and not wire.ended:
        control.data_received(noise)
    wire.hang_up()
    async with asyncio.timeout(60):
        await task
    return session._own


def states(table: SlotTable) -> dict[str, int]:
    """How many slots are in which state."""
    return {name: count for name, count in table.counts().items() if count and name in ("writing", "given_up")}


@settings(max_examples=examples(120))
@given(st.lists(REQUESTS, max_size=steps(8)), st.binary(max_size=20))
def test_a_host_answers_or_hangs_up_whatever_it_is_asked(requests: list[Message], noise: bytes) -> None:
    """By somebody who knows the secret: each request gets a reply or ends that one connection, and nothing else.

    What others put is there afterwards, bit for bit; when all is given up, no slot is left half written.
    """
    keep = rows(3, fill=4.0)
    with segments.arena(1 << 20) as arena, structlog.testing.capture_logs() as logs:
        table = SlotTable(arena, max_slot_bytes=1 << 16)
        # The row that is watched lies where no request points to.
        spares = [segments.put(table, spare, rows(1))[0] for spare in ("s1", "s2", "s3", "s4")]
        (grant,) = segments.put(table, "keep", keep)
        for spare in spares:
            assert table.drop(spare.slot, spare.generation, range(1))
        own = asyncio.run(serve(table, requests, noise))
        assert not [entry for entry in logs if entry["log_level"] in ("error", "critical")], logs
        for op in ("op-1", "op-2", "op-3", *{r.op_id for r in requests if isinstance(r, Reserve | Write)}):
            table.abort(own(op), 0.0, idle=True)
        assert not states(table)
        attempt = table.begin_read(grant.slot, grant.generation, ("a",), range(3))
        assert not isinstance(attempt, DataPlaneError), attempt
        payload = table.payload(attempt, ("a",), range(3))
        assert isinstance(payload, Payload)
        assert payload.checksum() == keep.checksum(range(3))
        table.finish_read(attempt)


# --- a client and what it is answered


HERE = HostRef("h", 7, (1,))
ASKED = (SlotRef(HERE, 0, 1, ("a",), range(2), range(2)), SlotRef(HERE, 1, 1, ("a",), range(1), range(2, 3)))
GOOD = [packed(rows(2)).tobytes(), packed(rows(1)).tobytes(), packed(rows(3)).tobytes()]


@st.composite
def parts(draw: st.DrawFn) -> list[PartHead]:
    """What a reply announces: mostly the rows that were asked for, of any size."""
    whole = draw(st.sampled_from([[[0, 1]], [[0], [1]], [[1]], [[1, 0]], [[0, 0]], [[2]], [[]], []]))
    made = []
    for refs in whole:
        right = draw(st.integers(0, 3)) > 0
        count = sum((2, 1, 7)[at] for at in refs) if right else draw(st.sampled_from([0, 1, 1 << 39]))
        nbytes = [(64, 32, 9)[at] for at in refs] if right else draw(st.lists(st.sampled_from(EDGES), max_size=2))
        size = draw(st.sampled_from([len(data) for data in GOOD]) | st.sampled_from([1 << 31, 1 << 33, *EDGES]))
        sums = draw(st.none() | st.lists(st.integers(0, 1 << 32), max_size=2))
        made.append(PartHead(refs, nbytes, draw(st.integers(0, 1 << 60)), min(size, 1 << 39), count, sums))
    return made


ERRORS = mostly(
    st.just([]),
    st.lists(
        st.tuples(st.sampled_from([0, 1, 2, 1 << 39]), st.text(max_size=5), st.text(max_size=5), st.none()), max_size=2
    ),
)
ROWS = values_of(
    Rows, parts=parts(), errors=ERRORS, inline=st.none() | mostly(st.sampled_from(GOOD), damaged(st.sampled_from(GOOD)))
)
#: What answers each request, and what might come instead.
ANSWERS = {
    "read": ROWS,
    "reserve": values_of(Granted),
    "write": st.builds(Written),
    "abort": values_of(Done),
    "drop": values_of(Done),
    "ask": values_of(HostFacts),
}
CALLS = {
    "read": lambda c: c.read(HERE, ASKED),
    "reserve": lambda c: c.reserve(HERE, "op", ("a",), [32], 0, ttl_s=1.0, wait_s=0.0, lane=False),
    "write": lambda c: c.write(HERE, "op", ASKED, rows(3), checksum=True),
    "abort": lambda c: c.abort("op", idle=True),
    "drop": lambda c: c.drop(HERE, [(0, 1, range(2), ())]),
    "ask": lambda c: c.ask(),
}


@settings(max_examples=examples(400))
@given(st.sampled_from(["read", "read", "read", *CALLS]), st.data(), st.sampled_from([0, 1 << 20]))
def test_a_client_takes_an_answer_or_says_what_is_wrong_with_it(verb: str, data: st.DataObject, inline: int) -> None:
    """From a host that knows the secret and says anything: a result, or an error of the plane; all rows or an error."""
    replies = data.draw(st.lists(mostly(ANSWERS[verb], values_of(Failed) | MESSAGES), min_size=1, max_size=2))

    async def ask() -> Any:
        control = Control()
        wire = line(control)
        control.open_up()
        welcome = Welcome(b"\0" * 32, "h", 7, "", "", 0, b"\0" * 16, 1.0, inline)
        connection = Connection(control, welcome, None, ("127.0.0.1", 1), CODEC, BufferPool())
        task = asyncio.ensure_future(CALLS[verb](connection))
        await wire.answer(0)
        for reply in replies:
            if not control.lost:
                control.data_received(pack_frame(reply))
        wire.hang_up()
        async with asyncio.timeout(60):
            return await task

    failed = None
    try:
        result = asyncio.run(ask())
    except DataPlaneError as err:
        failed = err
    assert not ran_out(failed)
    if failed is not None:
        return
    if verb == "read":
        for part in result.parts:
            wanted = sum(len(ASKED[at].rows) for at in part.refs)
            assert part.block.n == wanted
            readable(part.block)


def test_memory_is_taken_only_for_what_can_come() -> None:
    """A reply that announces 8 GiB over UCX, to a client without UCX: refused before any memory is taken for it."""

    async def read() -> None:
        control = Control()
        wire = line(control)
        control.open_up()
        welcome = Welcome(b"\0" * 32, "h", 7, "", "", 0, b"\0" * 16, 1.0, 0)
        connection = Connection(control, welcome, None, ("127.0.0.1", 1), CODEC, BufferPool())
        task = asyncio.ensure_future(connection.read(HERE, ASKED))
        await wire.answer(0)
        control.data_received(pack_frame(Rows([PartHead([0, 1], [64, 32], 1, 1 << 33, 3)], [])))
        await task

    with pytest.raises(DataPlaneUnsupported, match="no UCX") as caught:
        asyncio.run(read())
    assert not ran_out(caught.value)
