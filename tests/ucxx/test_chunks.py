import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncdp.process.buffer_pool import BufferPool
from asyncdp.rows.block import Block
from asyncdp.testing.contract.rig import until
from asyncdp.transports.ucxx.host.incoming import Incoming
from asyncdp.transports.ucxx.payload.blocks import layout_of, packed, segments_of
from asyncdp.transports.ucxx.payload.payload import messages_of
from asyncdp.transports.ucxx.wire.chunks import (
    AHEAD,
    FIRST_BYTES,
    JOINABLE_BYTES,
    JOINED_BYTES,
    batches,
    lengths_of,
    messages_of_write,
)
from asyncdp.transports.ucxx.wire.engine import MESSAGE_BYTES

SIZES = st.lists(st.integers(0, 2 * JOINABLE_BYTES), max_size=60)


@given(SIZES)
def test_every_payload_travels_once_in_order_and_large_ones_alone(sizes: list[int]) -> None:
    """Both ends reckon alike which payloads share a message; none of these is longer than it may be."""
    made = batches(sizes)
    assert [at for first, stop in made for at in range(first, stop)] == list(range(len(sizes)))
    for first, stop in made:
        assert stop > first
        assert stop == first + 1 or max(sizes[first:stop]) <= JOINABLE_BYTES
        assert stop == first + 1 or sum(sizes[first:stop]) <= JOINED_BYTES


@given(st.integers(1, 400), st.integers(1, JOINABLE_BYTES))
def test_small_payloads_need_few_messages(count: int, size: int) -> None:
    """All but the last message are full: the next payload would not have fitted."""
    made = batches([size] * count)
    assert all((stop - first + 1) * size > JOINED_BYTES for first, stop in made[:-1])


class Line:
    """An engine whose messages arrive when the test says so."""

    def __init__(self) -> None:
        self.posted: list[SimpleNamespace] = []

    def receive(self, endpoint: Any, tag: int, buffer: np.ndarray[Any, Any]) -> Any:
        """Post a receive."""
        del endpoint
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        operation = SimpleNamespace(tag=tag, buffer=buffer, arrived=arrived, wait=lambda: arrived)
        self.posted.append(operation)
        return operation


async def more() -> None:
    """Tell the peer to send on."""


async def look(first: int, stop: int) -> None:
    """Look at payloads that have come."""


@pytest.mark.anyio
async def test_only_a_few_messages_are_received_at_once() -> None:
    """However many slots a write has, what the host holds for it is bounded; each payload gets its own bytes."""
    size = JOINABLE_BYTES
    count = JOINED_BYTES // size * (AHEAD + 3)
    line: Any = Line()
    places = [np.zeros(size, np.uint8) for _ in range(count)]
    incoming = Incoming(line, None, 100, places, BufferPool())
    task = asyncio.ensure_future(incoming.receive(more, look))
    done, value = 0, 0
    per_message = JOINED_BYTES // size
    while done < -(-count // per_message):
        await asyncio.sleep(0)
        assert len(line.posted) - done <= AHEAD
        operation = line.posted[done]
        assert operation.tag == 100 + done
        for begin in range(0, len(operation.buffer), size):
            operation.buffer[begin : begin + size] = value
            value += 1
        operation.arrived.set_result(None)
        done += 1
    await task
    assert [int(place[0]) for place in places] == [int(place[-1]) for place in places] == list(range(count))
    assert incoming.operations == line.posted


@pytest.mark.anyio
async def test_a_host_expects_the_messages_that_a_client_sends() -> None:
    """Lengths and order are the same; each message that the client sends without a More was expected before."""
    sizes = [
        3,
        100,
        JOINABLE_BYTES,
        JOINABLE_BYTES + 1,
        MESSAGE_BYTES + FIRST_BYTES,
        *[JOINABLE_BYTES] * 70,
        5,
        2 << 20,
    ]
    lengths, later = messages_of_write(sizes)
    line: Any = Line()
    incoming = Incoming(line, None, 0, [np.zeros(size, np.uint8) for size in sizes], BufferPool())
    seen: list[tuple[int, int]] = []
    posted: list[int] = []

    async def note_more() -> None:
        posted.append(len(line.posted))

    async def note(first: int, stop: int) -> None:
        seen.append((first, stop))

    assert len(line.posted) == min(later)
    task = asyncio.ensure_future(incoming.receive(note_more, note))
    for number, length in enumerate(lengths):
        await until(lambda: len(line.posted) > number)  # noqa: B023 - awaited here
        assert (line.posted[number].tag, len(line.posted[number].buffer)) == (number, length)
        line.posted[number].arrived.set_result(None)
    await task
    assert len(line.posted) == len(lengths)
    assert [min(later), *posted] == [*sorted(later), len(lengths)]
    assert seen == batches(sizes)


@pytest.mark.parametrize("strided", [False, True])
def test_large_rows_are_sent_from_where_they_lie(strided: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """All bytes of the payload in messages of the lengths that both ends compute; of the user's own memory, but few."""
    wide = torch.arange(3 << 22, dtype=torch.int32).view(3, -1)
    block = Block.from_fields({"a": wide[:, ::2] if strided else wide, "b": torch.ones(3, 5), "c": ["x", "yy", ""]}, 3)
    layout = layout_of(block)
    lengths = lengths_of(layout.nbytes)
    taken: list[int] = []

    def take(nbytes: int) -> Any:
        taken.append(nbytes)
        return np.empty(nbytes, np.uint8)

    made = [
        message for message in messages_of(segments_of(block, layout), lengths, take, 1 << 20) if message is not None
    ]
    assert [len(message) for message in made] == lengths
    assert b"".join(message.tobytes() for message in made) == packed(block).tobytes()
    if not strided:
        assert sum(taken) == lengths[0] + lengths[-1]
        (begin,) = {message.ctypes.data for message in made[1:2]}
        assert wide.data_ptr() < begin < wide.data_ptr() + wide.nbytes


@pytest.mark.anyio
async def test_a_message_that_breaks_ends_the_write() -> None:
    """The error comes out, and all that was posted is known, to be waited for."""
    line: Any = Line()
    places = [np.zeros(JOINABLE_BYTES + 1, np.uint8) for _ in range(3)]
    incoming = Incoming(line, None, 0, places, BufferPool())
    assert [operation.buffer.ctypes.data for operation in incoming.operations[::2]] == [p.ctypes.data for p in places]
    line.posted[0].arrived.set_exception(ConnectionResetError())
    with pytest.raises(ConnectionResetError):
        await incoming.receive(more, look)
    assert len(incoming.operations) == 6
