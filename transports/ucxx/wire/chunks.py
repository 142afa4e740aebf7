"""Payloads in UCX messages with consecutive tags: small payloads are joined, large ones are split."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

from .engine import MESSAGE_BYTES, Engine, Operation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

__all__ = [
    "AHEAD",
    "REPLY_BYTES",
    "batches",
    "lengths_of",
    "messages_of_write",
    "pieces_of",
    "post_receives",
    "send_all",
    "send_messages",
    "wait_all",
]

#: Largest message of the reply to a read in bytes: the host copies one while the one before it is on the way.
REPLY_BYTES: Final = 4 << 20
#: Messages posted before the first one has ended: enough to use the bandwidth, few enough to cancel quickly.
AHEAD: Final = 8
#: Largest payload in bytes that shares a message with others, from which the receiver copies it; larger ones are
#: received directly into their slots. Measured, joined and each alone: 256 x 64 KB 25 and 84 ms, 64 x 256 KB 17 and
#: 40 ms, 34 x 480 KB 15 and 17 ms.
JOINABLE_BYTES: Final = 512 << 10
#: Largest joined message in bytes, so that a receiver needs little memory and can copy one message during the next.
JOINED_BYTES: Final = 4 << 20
#: Length in bytes of the first message of a payload that has several. Mostly it holds all that comes before the data,
#: so that the sender copies no data that follow.
FIRST_BYTES: Final = 64 << 10


def batches(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return which payloads of these sizes share a message, as (first, stop); both ends of a write compute it."""
    out: list[tuple[int, int]] = []
    first, total = 0, 0
    for at, size in enumerate(sizes):
        if at > first and (size > JOINABLE_BYTES or total + size > JOINED_BYTES):
            out.append((first, at))
            first, total = at, 0
        total += size
        if size > JOINABLE_BYTES:
            out.append((at, at + 1))
            first, total = at + 1, 0
    return [*out, (first, len(sizes))] if first < len(sizes) else out


def lengths_of(nbytes: int) -> list[int]:
    """Return the lengths of the messages of a payload that shares none; both ends of a write compute it."""
    if nbytes <= JOINABLE_BYTES:
        return [nbytes]
    whole, rest = divmod(nbytes - FIRST_BYTES, MESSAGE_BYTES)
    return [FIRST_BYTES, *[MESSAGE_BYTES] * whole, *([rest] if rest else [])]


def messages_of_write(sizes: Sequence[int]) -> tuple[list[int], set[int]]:
    """Return the lengths of the messages of a write of payloads of these sizes, and which the host expects later only.

    These, by number, are the first ones of what is beyond ``AHEAD`` batches.
    """
    lengths: list[int] = []
    later: set[int] = set()
    for number, (first, stop) in enumerate(batches(sizes)):
        if number >= AHEAD:
            later.add(len(lengths))
        lengths += lengths_of(sizes[first]) if stop == first + 1 else [sum(sizes[first:stop])]
    return lengths, later


def pieces_of(buffer: Bytes, lengths: Iterable[int]) -> Iterator[Bytes]:
    """Return consecutive parts of a buffer."""
    begin = 0
    for length in lengths:
        yield buffer[begin : begin + length]
        begin += length


def post_receives(
    engine: Engine, endpoint: Any, tag: int, buffers: Sequence[Bytes], most: int = MESSAGE_BYTES
) -> list[Operation]:
    """Post receives that together fill the buffers, in order; their tags are ``tag``, ``tag + 1``, ...

    Each message has ``most`` bytes, the last one of a buffer those that are left.
    """
    pieces = (buffer[begin : begin + most] for buffer in buffers for begin in range(0, len(buffer), most))
    return [engine.receive(endpoint, at, piece) for at, piece in enumerate(pieces, tag)]


async def wait_all(operations: Iterable[Operation]) -> None:
    """Wait until all operations have ended; raise the first error, after which the connection must not be used."""
    for operation in operations:
        await operation.wait()


async def send_all(
    engine: Engine,
    endpoint: Any,
    tag: int,
    messages: Iterable[Bytes | None],
    more: Callable[[], Awaitable[object]] | None = None,
    later: Container[int] = (),
) -> None:
    """Send messages, in order, with at most ``AHEAD`` of them posted at a time.

    Args:
        engine: UCX engine.
        endpoint: UCX connection to the receiver.
        tag: Tag of the first message; further messages have the following tags.
        messages: Messages, made as they are sent; the event loop runs after each and where there is None instead.
        more: Awaited before each message in ``later``; returns once the receiver expects it.
        later: Numbers of the messages that the receiver does not expect yet.
    """
    under_way: deque[Operation] = deque()
    number = 0
    for message in messages:
        if message is not None:
            if more is not None and number in later:
                await more()
            if len(under_way) >= AHEAD:
                await under_way.popleft().wait()
            under_way.append(engine.send(endpoint, tag + number, message))
            number += 1
        await asyncio.sleep(0)
    await wait_all(under_way)


class SlicedWork(Protocol):
    """Tells when long work has to let others have their turn."""

    @property
    def over(self) -> bool:
        """Whether it has."""

    async def next(self) -> None:
        """Let them."""


async def send_messages(
    engine: Engine, endpoint: Any, tag: int, messages: Iterator[Bytes | None], sent: list[Operation], work: SlicedWork
) -> None:
    """Send messages as they come, tagged from ``tag`` upwards, at most ``AHEAD`` at a time; append all to ``sent``.

    The work between two messages, or two of None, which are not sent, is bounded.
    """
    first = len(sent)
    for message in messages:
        if work.over:
            await work.next()
        if message is None:
            continue
        if len(sent) - first >= AHEAD:
            await sent[first].wait()
            first += 1
        sent.append(engine.send(endpoint, tag, message))
        tag += 1
    await wait_all(sent[first:])
