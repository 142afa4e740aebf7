"""Both ends of a control stream without a socket between them: what is sent is handed over at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from asyncdp.transports.ucxx.wire.messages import BODY_BYTES, HEAD_BYTES, Message, unpack_body, unpack_head

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.wire.control import Control

__all__ = ["Line", "line"]


class Line(asyncio.Transport):
    """The transport under a Control; the test holds the other end.

    Attributes:
        sent: Messages that the Control sent, in order.
    """

    def __init__(self, control: Control) -> None:
        super().__init__()
        self.control = control
        self.sent: list[Message] = []
        self.paused = False
        self.ended = False
        self._news = asyncio.Event()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Be on this machine."""
        return ("127.0.0.1", 1) if name == "peername" else default

    def write(self, data: Any) -> None:
        """Take one frame."""
        length = unpack_head(bytes(data[:HEAD_BYTES]), BODY_BYTES)
        assert len(data) == HEAD_BYTES + length
        self.sent.append(unpack_body(bytes(data[HEAD_BYTES:])))
        self._news.set()

    def pause_reading(self) -> None:
        """Take no more for now."""
        self.paused = True

    def resume_reading(self) -> None:
        """Go on."""
        self.paused = False

    def abort(self) -> None:
        """End."""
        self.ended = True
        self._news.set()

    close = abort

    def hang_up(self) -> None:
        """Be gone, as the peer."""
        if not self.control.lost:
            self.control.connection_lost(ConnectionResetError("the peer hung up"))

    async def answer(self, known: int) -> Message | None:
        """Return what was sent after the first ``known`` messages, or None where the stream ended instead."""
        async with asyncio.timeout(60):
            while len(self.sent) <= known and not self.ended:
                self._news.clear()
                await self._news.wait()
        return self.sent[known] if len(self.sent) > known else None


def line(control: Control) -> Line:
    """Connect a Control."""
    made = Line(control)
    control.connection_made(made)
    return made
