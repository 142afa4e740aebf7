"""Connects TransferQueue's client, whose handshake blocks, within a deadline and cancellably."""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio.to_thread
from zmq.sugar.context import Context

from asyncdp.errors import DataPlaneError

from ..endpoints import address_towards
from ..mooncake.store import shared_store
from ..private import Client
from .heartbeat import Heartbeat

if TYPE_CHECKING:
    from asyncdp.config import TransferQueueSettings

    from ..endpoints import Endpoints
    from ..mooncake.store import Store

__all__ = ["connect"]


async def connect(
    endpoints: Endpoints, settings: TransferQueueSettings, infos: Callable[[], Mapping[str, Any]] | None
) -> Client:
    """Connect in a thread, because the handshake blocks for about 4 s without an answer and cannot be interrupted.

    It starts only after a heartbeat has reached the controller, and ends for the caller when the heartbeat fails or the
    caller is cancelled; a connection that the thread completes after that is closed by the thread.

    Raises:
        DataPlaneUnavailable: The controller does not answer.
    """
    name = f"asyncdp-{uuid.uuid4().hex[:12]}"
    store = None if endpoints.mooncake is None else partial(_store, endpoints, endpoints.mooncake)
    pending = _Pending(lambda: Client(name, endpoints, infos, store))
    controller = endpoints.controller
    context: Any = Context()
    watch = Heartbeat(
        context,
        "the controller",
        controller.address("request_handle_socket"),
        interval_s=settings.heartbeat_interval_s,
        timeout_s=settings.heartbeat_timeout_s,
    )

    async def make() -> Client:
        return await anyio.to_thread.run_sync(pending.connect, abandon_on_cancel=True)

    try:
        await watch.heard()
        return await watch.guard(make, math.inf, host=controller.id)
    except BaseException as err:
        pending.abandon()
        if isinstance(err, DataPlaneError):
            err.ambiguous = False  # no request was sent yet
        raise
    finally:
        watch.close()
        context.term()


def _store(endpoints: Endpoints, told: Mapping[str, Any]) -> Store:
    controller = endpoints.controller
    ip = address_towards(controller)
    return shared_store(controller.id, told["master"], told["buffer_bytes"], ip, told["protocol"])


class _Pending:
    """A connection that a thread creates for a caller that may have given up when it is complete."""

    def __init__(self, make: Callable[[], Client]) -> None:
        """Start without a connection."""
        self._make = make
        self._lock = threading.Lock()
        self._made: Client | None = None
        self._abandoned = False

    def connect(self) -> Client:
        """Create the connection; blocks."""
        made = self._make()
        with self._lock:
            self._made = made
            abandoned = self._abandoned
        if abandoned:
            made.close()
        return made

    def abandon(self) -> None:
        """Close the connection now, or as soon as it is created."""
        with self._lock:
            self._abandoned = True
            made = self._made
        if made is not None:
            made.close()
