"""Payloads, slot headers and objects: as many rows as it says, or CorruptPayload."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncdp.errors import CorruptPayload, DataPlaneError
from asyncdp.transports.ucxx.host.recovery import recover_slots
from asyncdp.transports.ucxx.payload.blocks import block_of, packed
from asyncdp.transports.ucxx.payload.layout import PREFIX_BYTES
from asyncdp.transports.ucxx.payload.objects import MsgpackCodec
from asyncdp.transports.ucxx.payload.payload import Payload
from asyncdp.transports.ucxx.slots.arena import WORDS
from asyncdp.transports.ucxx.slots.header import Header, Outcome, State, read_outcome, read_state
from asyncdp.transports.ucxx.slots.table import SlotTable
from tests.fuzz.memory_limit import little_memory, ran_out
from tests.fuzz.readable import readable
from tests.fuzz.scale import examples
from tests.fuzz.strategies import EDGES, damaged
from tests.ucxx import segments
from tests.ucxx.segments import rows
from tests.ucxx.test_payload import BLOCKS

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("msgpack", reason="needs the extra ucxx")
CODEC = MsgpackCodec()


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    with little_memory():
        yield


# --- payloads


@st.composite
def payloads(draw: st.DrawFn) -> bytes:
    """A payload that was changed, mostly with a head whose checksum is right again."""
    whole = packed(draw(st.sampled_from(list(BLOCKS.values())))).tobytes()
    data = bytearray(draw(damaged(st.just(whole))))
    if draw(st.integers(0, 4)) and len(data) >= PREFIX_BYTES:
        for at, code in ((8, "<I"), (12, "<Q"), (20, "<Q")):  # bytes of schema, rows, bytes in all
            if draw(st.integers(0, 5)) == 0:
                struct.pack_into(code, data, at, draw(st.sampled_from(EDGES[:14])))
        struct.pack_into("<Q", data, 20, draw(st.sampled_from([len(data), struct.unpack_from("<Q", data, 20)[0]])))
        schema = struct.unpack_from("<I", data, 8)[0]
        head = draw(st.sampled_from([64, 128, (PREFIX_BYTES + schema + 63) // 64 * 64]))
        struct.pack_into("<I", data, 28, zlib.crc32(data[PREFIX_BYTES:head]))
    return bytes(data)


@settings(max_examples=examples(300))
@given(payloads() | st.binary(max_size=100), st.none() | st.sampled_from([0, 1, 3, 4]))
def test_a_payload_is_rows_or_corrupt(data: bytes, n: int | None) -> None:
    """Any bytes: as many rows as it says, every value within its bytes, or CorruptPayload."""
    buffer = np.frombuffer(bytearray(data), np.uint8)
    try:
        payload = Payload.read(buffer, n)
    except CorruptPayload:
        return
    assert payload.layout.nbytes <= len(buffer)
    assert n is None or payload.layout.n == n
    if payload.layout.n > 1 << 16:
        return  # rows without bytes: there may be many, and nobody reads them one by one here
    assert payload.row_bytes().sum() <= len(buffer)
    payload.checksum()
    readable(block_of(payload, CODEC))


def schemas() -> st.SearchStrategy[bytes]:
    """Descriptions of columns, right and wrong."""
    sizes = st.lists(st.sampled_from([0, 1, 2, 3, -1, 255, 1 << 20, 1 << 39, 1 << 62]), max_size=3)
    dtypes = st.sampled_from(["float32", "bfloat16", "int64", "bool", "", "float8_e4m3fn", "qint8", "complex128"])
    column = st.tuples(
        st.sampled_from(["a", "b", ""]), st.integers(-1, 3), dtypes, sizes, st.integers(-1, 4), st.booleans()
    )
    return st.lists(column.map(list), max_size=3).map(msgspec.msgpack.encode)


@settings(max_examples=examples(300))
@given(schemas(), st.sampled_from([0, 1, 2, 3, 1 << 20, 1 << 39]), st.data())
def test_a_head_of_any_schema_is_rows_or_corrupt(schema: bytes, n: int, data: st.DataObject) -> None:
    """Any columns, any lengths, under a checksum that is right: what it says fits its bytes, or CorruptPayload."""
    lengths = data.draw(st.lists(st.sampled_from([0, 1, 2, 5, -1, 1 << 26, 1 << 62]), max_size=8))
    body = schema + bytes(-(PREFIX_BYTES + len(schema)) % 64) + struct.pack(f"<{len(lengths)}q", *lengths)
    body += bytes(-(PREFIX_BYTES + len(body)) % 64)
    whole = data.draw(st.sampled_from([len(body) + PREFIX_BYTES + extra for extra in (0, 64, 128, 1024)]))
    head = (PREFIX_BYTES + len(body)) if data.draw(st.booleans()) else 64
    crc = zlib.crc32((body + bytes(2048))[: head - PREFIX_BYTES])
    prefix = struct.pack("<4sBBHIQQI", b"ADPP", 1, 0, 0, len(schema), n, whole, crc)
    buffer = np.frombuffer(bytearray((prefix + body).ljust(whole, b"\0")), np.uint8)
    try:
        payload = Payload.read(buffer)
    except CorruptPayload:
        return
    assert payload.layout.n == n
    assert payload.layout.nbytes == whole
    if n <= 1 << 16:
        readable(block_of(payload, CODEC))


# --- slot headers


@settings(max_examples=examples(150))
@given(
    st.lists(st.tuples(st.integers(0, 16 * 8 - 1), st.sampled_from(EDGES) | st.integers(0, (1 << 64) - 1)), max_size=12)
)
def test_any_words_are_a_slot_or_none(words: list[tuple[int, int]]) -> None:
    """Headers of a few slots with any words in them: no error to read; a new host adopts what makes sense."""
    with segments.arena(1 << 20) as arena:
        table = SlotTable(arena, max_slot_bytes=1 << 16)
        for i in range(4):
            segments.put(table, f"op-{i}", rows(2))
        for at, word in words:
            arena.words[at % (8 * WORDS)] = word
        for number in range(8):
            state, generation = read_state(arena, number)
            assert isinstance(state, State)
            assert isinstance(read_outcome(arena, number, generation), Outcome)
            header = Header.read(arena, number, generation)
            assert header is None or header.rows >= 0
        again = SlotTable(arena, max_slot_bytes=1 << 16)
        counts = recover_slots(again)
        assert counts["kept"] == len(again.slots) + 0
        for number, slot in list(again.slots.items()):
            attempt = again.begin_read(number, slot.generation, ("a",), range(slot.header.rows))
            if not isinstance(attempt, DataPlaneError):
                again.finish_read(attempt)


# --- objects


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(max_size=6)
    | st.binary(max_size=6)
    | st.binary(max_size=6).map(bytearray),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(-5, 5), inner, max_size=3)
        | st.sets(st.integers() | st.text(max_size=3), max_size=3)
        | st.frozensets(st.integers() | st.tuples(st.integers()), max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=examples(200))
@given(VALUES)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    """Of the same type, all the way down."""

    def typed(it: Any) -> Any:
        if isinstance(it, dict):
            return dict, [(typed(k), typed(v)) for k, v in it.items()]
        if isinstance(it, list | tuple):
            return type(it), [typed(v) for v in it]
        if isinstance(it, set | frozenset):
            return type(it), {(type(v), v) for v in it}
        return type(it), it

    assert typed(CODEC.loads(CODEC.dumps(value))) == typed(value)


def extensions() -> st.SearchStrategy[bytes]:
    """Values under every extension type, with bodies that are right or anything."""
    import msgpack

    arrays = st.tuples(
        st.sampled_from(
            ["<f4", "<i8", "|S0", "<U0", "|O", "<U1000000000", "(1000000,)f8", "<M8[ns]", "i4,i4", "V8", "x"]
        ),
        st.lists(st.sampled_from([0, 1, 2, -1, 1 << 40, 1 << 62]), max_size=3),
        st.binary(max_size=16),
    ).map(list)
    bodies = st.one_of(st.binary(max_size=20), arrays.map(msgpack.packb), VALUES.map(CODEC.dumps))
    return st.tuples(st.integers(0, 127), bodies).map(lambda pair: msgpack.packb(msgpack.ExtType(*pair)))


@settings(max_examples=examples(300))
@given(st.binary(max_size=60) | damaged(VALUES.map(CODEC.dumps)) | extensions() | damaged(extensions()))
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xc6\xff\xff\xff\xff")
@example(b"\x91" * 100_000)
def test_bytes_are_a_value_or_corrupt(data: bytes) -> None:
    """Never another error, never code that runs, never memory that the bytes do not pay for."""
    failed = None
    try:
        CODEC.loads(data)
    except CorruptPayload as err:
        failed = err
    assert not ran_out(failed)
