"""Pairs of a client and a backend whose answers the test gives."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import anyio

from asyncdp.client import Client
from asyncdp.compose.composition import SlotMapping
from asyncdp.factory import stack
from asyncdp.meta import DataPlaneCapabilities
from asyncdp.middleware.attempt_timeout import AttemptTimeout

from .backend import Backend, Scripted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from asyncdp.calls import Call
    from asyncdp.service import Service

__all__ = ["Pair", "pair"]

#: Default capabilities of a pair: all of them, so that no layer disables a feature.
ALL = DataPlaneCapabilities(**dict.fromkeys(DataPlaneCapabilities.__dataclass_fields__, True))
#: Maximum time in seconds for closing the client at the end of ``async with pair()``; more than its layers ever take.
CLOSE_S = 10.0


class Pair(NamedTuple):
    """Result of :func:`pair`: a tuple (client, backend) that can also be used with ``async with``."""

    client: Client
    backend: Backend

    async def __aenter__(self) -> Self:
        """Return the pair itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client; if the body raised nothing, check that every request was answered."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_S):
            await self.client.close()
        if err is None:
            self.backend.finish()


def pair(
    transport: Service | Client | None = None,
    *,
    layers: Sequence[Callable[[Any], Any]] | None = (),
    only: Sequence[type[Call[Any]]] | None = None,
    slots: bool = True,
    capabilities: DataPlaneCapabilities | None = None,
    **settings: Any,
) -> Pair:
    """Return a client and its backend, from which the test takes requests and answers them.

    ::

        async with pair(slots=False) as (client, backend):
            async with anyio.create_task_group() as group:
                group.start_soon(controller.step, client)
                call = await backend.next(ListMetadata)
                call.fail(DataPlaneUnavailable("the directory died"))

        client, backend = pair(MemoryTransport(), only=[ReadSlots], attempt_timeout_s=1.0)
        ...
        call = await backend.next(ReadSlots)
        call.drop()  # the port is silent
        call = await backend.next(ReadSlots)
        call.forward()  # another port answers, from memory

    Args:
        transport: Transport that answers forwarded requests and those that ``only`` excludes; useful because
            ``Locate`` and ``ReadSlots`` are tedious to answer by hand. None: the test answers all requests.
        layers: As ``stack()`` takes them. The default is a single layer that ends each call at its ``timeout_s``, so
            that the test sees exactly the requests of the verbs. With None, or with any layer setting: the default
            layers.
        only: Types of calls that the test answers; requires a transport for the others. None: all types.
        slots: Whether the backend gets slot calls (``Locate``, ``ReadSlots``, ``Publish``, ...) or whole verbs
            (``GetSamples``, ``PutSamples``, ``ClaimMeta``, ...).
        capabilities: Capabilities of the backend. None: those of the transport, or all without a transport.
        **settings: As ``stack()`` takes them: ``attempt_timeout_s=1.0``, ``call_timeout_s=5.0``.

    Raises:
        ValueError: ``only`` is given without a transport, or no layer has one of the settings.
    """
    behind = transport.given if isinstance(transport, Client) else transport
    if only is not None and behind is None:
        raise ValueError("only: there is nothing behind this pair that could answer the other calls")
    if capabilities is None:
        capabilities = ALL if behind is None else behind.get_capabilities()
    if behind is not None and not slots and behind.get_capabilities().slot_addressable:
        behind = SlotMapping(behind)  # forwarded requests are whole verbs
    backend = Backend()
    scripted = Scripted(backend, behind, only, replace(capabilities, slot_addressable=slots))
    chosen = layers
    if layers == ():
        # A call that the test does not answer ends at its timeout, as it does on every backend.
        chosen = None if settings.keys() - _OF_STACK else [partial(AttemptTimeout, attempt_timeout_s=math.inf)]
    return Pair(stack(scripted, chosen, **settings), backend)


#: Arguments of ``stack()`` that are not layer settings.
_OF_STACK = frozenset({"call_timeout_s", "claim_poll_s", "clock", "on_event", "retry_budget", "rng"})
