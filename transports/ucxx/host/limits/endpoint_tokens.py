"""Authentication of new UCX connections: each has to send a one-time token within a timeout, or it is closed.

The UCX listener binds to every address of the machine and accepts any connection. Before authentication the host reads
only the sixteen bytes of the token, and it allows only a limited number of unauthenticated connections at a time.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import structlog

if TYPE_CHECKING:
    from ...wire.engine import Engine

__all__ = ["Claims"]

_TOKEN_BYTES: Final = 16
_STRANGERS: Final = 64


class Claims:
    """Matches UCX connections with the control streams over which their tokens were sent.

    Args:
        engine: UCX engine of the host.
        patience_s: Seconds that a new connection may take to send its token.
    """

    def __init__(self, engine: Engine, patience_s: float) -> None:
        """Start with no outstanding tokens."""
        self._engine = engine
        self._patience_s = patience_s
        self._waiting: dict[bytes, asyncio.Future[Any]] = {}
        self._tasks: dict[asyncio.Task[None], Any] = {}  # of endpoints without a token yet, the oldest first
        self._log = structlog.get_logger("asyncdp.ucxx")

    def give(self) -> tuple[bytes, asyncio.Future[Any]]:
        """Create a token; the returned future resolves to the UCX endpoint that sends it."""
        token = secrets.token_bytes(_TOKEN_BYTES)
        future: asyncio.Future[Any] = self._engine.loop.create_future()
        self._waiting[token] = future
        return token, future

    def withdraw(self, token: bytes) -> None:
        """Invalidate a token and cancel its future."""
        future = self._waiting.pop(token, None)
        if future is not None:
            future.cancel()

    def accept(self, endpoint: Any) -> None:
        """Take a connection from the listener; where too many are unauthenticated, close the oldest of them."""
        if len(self._tasks) >= _STRANGERS:
            oldest, kept = next(iter(self._tasks.items()))
            del self._tasks[oldest]
            if oldest.cancel():  # else it has shown its token
                self._engine.loop.call_soon(self._engine.abandon, kept)
        task = self._engine.loop.create_task(self._identify(endpoint))
        self._tasks[task] = endpoint
        task.add_done_callback(lambda ended: self._tasks.pop(ended, None))

    async def _identify(self, endpoint: Any) -> None:
        token = np.zeros(_TOKEN_BYTES, np.uint8)
        try:
            async with asyncio.timeout(self._patience_s):
                await self._engine.receive_token(endpoint, token).wait()
            future = self._waiting.pop(token.tobytes())
            if future.done():
                raise KeyError(token)  # noqa: TRY301 - handled like an unknown token
            future.set_result(endpoint)
        except Exception as err:  # noqa: BLE001 - no error of a peer may stop the host
            self._log.info("a UCX connection without a good token was closed", why=type(err).__name__)
            self._engine.abandon(endpoint)

    async def close(self) -> None:
        """Close all unauthenticated connections and cancel the outstanding tokens."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for future in self._waiting.values():
            future.cancel()
        self._waiting.clear()
