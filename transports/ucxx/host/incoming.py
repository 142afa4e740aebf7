"""Receive the payloads of one write request into its slots."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from ..wire.chunks import AHEAD, batches, lengths_of, pieces_of, wait_all

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import numpy as np
    import numpy.typing as npt

    from asyncdp.process.buffer_pool import BufferPool

    from ..wire.engine import Engine, Operation

    Bytes = npt.NDArray[np.uint8]

__all__ = ["Incoming"]


class Incoming:
    """Receives large payloads directly into their slots, and small ones joined in messages from which it copies them.

    The number of messages received at once is bounded, so their buffers stay within a few times ``JOINED_BYTES``
    however many slots one write has.

    Args:
        engine, endpoint: UCX engine and connection that the payloads come from.
        tag: UCX tag of the first message; further messages have the following tags.
        places: Destination of each payload, of the payload's length.
        buffers: Pool of the buffers for joined messages.

    Attributes:
        operations: UCX operations that were posted; until all have ended, UCX may write into the slots.
    """

    def __init__(self, engine: Engine, endpoint: Any, tag: int, places: Sequence[Bytes], buffers: BufferPool) -> None:
        """Post the first receives."""
        self.operations: list[Operation] = []
        self._engine = engine
        self._endpoint = endpoint
        self._tag = tag
        self._places = places
        self._buffers = buffers
        self._left = deque(batches([len(place) for place in places]))
        self._under_way: deque[tuple[list[Operation], Sequence[Bytes], Bytes | None]] = deque()
        for _ in range(AHEAD):
            self._post()

    def _post(self) -> None:
        if not self._left:
            return
        first, stop = self._left.popleft()
        parts = self._places[first:stop]
        joined = None if len(parts) == 1 else self._buffers.empty(sum(map(len, parts)))
        pieces = pieces_of(parts[0], lengths_of(len(parts[0]))) if joined is None else [joined]
        operations = [self._engine.receive(self._endpoint, tag, piece) for tag, piece in enumerate(pieces, self._tag)]
        self._tag += len(operations)
        self.operations += operations
        self._under_way.append((operations, parts, joined))

    async def receive(
        self, more: Callable[[], Awaitable[object]], done: Callable[[int, int], Awaitable[object]]
    ) -> None:
        """Wait until all payloads are in their slots; raise the first error.

        Args:
            more: Called each time that a further receive was posted; it tells the client to send the next message.
            done: Called with the range of the payloads that are in their slots, while later ones are on the way.
        """
        arrived = 0
        while self._under_way:
            operations, parts, joined = self._under_way.popleft()
            await wait_all(operations)
            if self._left:
                self._post()
                await more()
            if joined is not None:
                begin = 0
                for part in parts:
                    part[:] = joined[begin : begin + len(part)]
                    begin += len(part)
            await done(arrived, arrived + len(parts))
            arrived += len(parts)
