import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdp.process.buffer_pool import BufferPool
from asyncdp.transports.ucxx.host.incoming import Incoming
from asyncdp.transports.ucxx.wire.chunks import AHEAD, JOINABLE_BYTES, JOINED_BYTES, batches

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


@pytest.mark.anyio
async def test_only_a_few_messages_are_received_at_once() -> None:
    """However many slots a write has, what the host holds for it is bounded; each payload gets its own bytes."""
    size = JOINABLE_BYTES
    count = JOINED_BYTES // size * (AHEAD + 3)
    line: Any = Line()
    places = [np.zeros(size, np.uint8) for _ in range(count)]
    incoming = Incoming(line, None, 100, places, BufferPool())
    task = asyncio.ensure_future(incoming.receive(more))
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
async def test_a_message_that_breaks_ends_the_write() -> None:
    """The error comes out, and all that was posted is known, to be waited for."""
    line: Any = Line()
    places = [np.zeros(JOINABLE_BYTES + 1, np.uint8) for _ in range(3)]
    incoming = Incoming(line, None, 0, places, BufferPool())
    assert [operation.buffer.ctypes.data for operation in incoming.operations] == [p.ctypes.data for p in places]
    line.posted[0].arrived.set_exception(ConnectionResetError())
    with pytest.raises(ConnectionResetError):
        await incoming.receive(more)
    assert len(incoming.operations) == 3
