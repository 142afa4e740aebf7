"""Payloads in messages: cut into pieces that UCX moves well, tagged one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdp.transports.ucxx.engine import MESSAGE_BYTES, Engine, Operation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

__all__ = ["post_receives", "send_all", "wait_all"]

#: Messages that are posted before the first has ended: enough to keep the line busy, few enough to give up quickly.
_AHEAD = 8


def _pieces(buffers: Sequence[Bytes]) -> Iterator[Bytes]:
    for buffer in buffers:
        for begin in range(0, len(buffer), MESSAGE_BYTES):
            yield buffer[begin : begin + MESSAGE_BYTES]


def post_receives(engine: Engine, endpoint: Any, tag: int, buffers: Sequence[Bytes]) -> list[Operation]:
    """Post receives that together fill the buffers, in order; the tags count up from ``tag``."""
    return [engine.receive(endpoint, at, piece) for at, piece in enumerate(_pieces(buffers), tag)]


async def wait_all(operations: Sequence[Operation]) -> None:
    """Wait until all have ended; the first error is raised (then the connection is of no use any more)."""
    for operation in operations:
        await operation.wait()


async def send_all(engine: Engine, endpoint: Any, tag: int, buffers: Sequence[Bytes]) -> None:
    """Send the buffers, in order, a few messages ahead."""
    under_way: list[Operation] = []
    for at, piece in enumerate(_pieces(buffers), tag):
        if len(under_way) >= _AHEAD:
            await under_way.pop(0).wait()
        under_way.append(engine.send(endpoint, at, piece))
    await wait_all(under_way)
