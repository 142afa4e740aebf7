"""Payloads in UCX messages with consecutive tags: small payloads are joined, large ones are split."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from .engine import MESSAGE_BYTES, Engine, Operation

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

__all__ = ["AHEAD", "REPLY_BYTES", "batches", "post_receives", "send_all", "send_messages", "wait_all"]

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


def _pieces(buffers: Sequence[Bytes], most: int) -> Iterator[Bytes]:
    for buffer in buffers:
        for begin in range(0, len(buffer), most):
            yield buffer[begin : begin + most]


def post_receives(
    engine: Engine, endpoint: Any, tag: int, buffers: Sequence[Bytes], most: int = MESSAGE_BYTES
) -> list[Operation]:
    """Post receives that together fill the buffers, in order; their tags are ``tag``, ``tag + 1``, ...

    Each message has ``most`` bytes, the last one of a buffer those that are left.
    """
    return [engine.receive(endpoint, at, piece) for at, piece in enumerate(_pieces(buffers, most), tag)]


async def wait_all(operations: Sequence[Operation]) -> None:
    """Wait until all operations have ended; raise the first error, after which the connection must not be used."""
    for operation in operations:
        await operation.wait()


async def send_all(
    engine: Engine,
    endpoint: Any,
    tag: int,
    buffers: Sequence[Bytes],
    more: Callable[[], Awaitable[object]] | None = None,
) -> None:
    """Send the buffers, in order, with at most ``AHEAD`` messages posted at a time.

    Args:
        engine: UCX engine.
        endpoint: UCX connection to the receiver.
        tag: Tag of the first message; further messages have the following tags.
        buffers: Buffers to send.
        more: Awaited before each buffer but the first ``AHEAD``; returns once the receiver expects it. None: the
            receiver expects all buffers already.
    """
    under_way: list[Operation] = []
    for number, buffer in enumerate(buffers):
        if more is not None and number >= AHEAD:
            await more()
        for piece in _pieces([buffer], MESSAGE_BYTES):
            if len(under_way) >= AHEAD:
                await under_way.pop(0).wait()
            under_way.append(engine.send(endpoint, tag, piece))
            tag += 1
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
