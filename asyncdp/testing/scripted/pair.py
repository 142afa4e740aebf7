"""A client, and the backend behind it in the hands of the test."""

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

#: What a pair claims to guarantee unless told otherwise: everything, so that every layer does all it can.
ALL = DataPlaneCapabilities(**dict.fromkeys(DataPlaneCapabilities.__dataclass_fields__, True))
#: Seconds that closing a client may take at the end of ``async with pair()``: above what its layers take at most.
CLOSE_S = 10.0


class Pair(NamedTuple):
    """What :func:`pair` returns: to be taken apart, or to be used with ``async with``."""

    client: Client
    backend: Backend

    async def __aenter__(self) -> Self:
        """Return the pair itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client; where the body went well, check that every request was answered."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_S):
            await self.client.close()
        if err is None:
            self.backend.finish()


def pair(
    transport: Service | Client | None = None,
    *,
    layers: Sequence[Callable[[Client], Any]] | None = (),
    only: Sequence[type[Call[Any]]] | None = None,
    slots: bool = True,
    capabilities: DataPlaneCapabilities | None = None,
    **settings: Any,
) -> Pair:
    """Return a client, and the backend that the test plays for it.

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
        transport: What answers the requests that are forwarded, and those that ``only`` leaves out; ``Locate`` and
            ``ReadSlots`` are tedious to answer by hand.
        layers: As ``stack()`` takes them. By default only what ends each call by its ``timeout_s``, so that the test
            sees what the verbs ask for. None, or any setting of a layer: the default ones.
        only: The kinds of calls that come to the test; needs a transport for the others. Default: all.
        slots: Whether the backend is asked in slot calls (``Locate``, ``ReadSlots``, ``Publish``, ...); else in whole
            verbs (``GetSamples``, ``PutSamples``, ``ClaimMeta``, ...).
        capabilities: What the backend claims to guarantee; default: that of the transport, else everything.
        **settings: As ``stack()`` takes them: ``attempt_timeout_s=1.0``, ``call_timeout_s=5.0``.

    Raises:
        ValueError: ``only`` without a transport, or a setting that no layer has.
    """
    behind = transport.given if isinstance(transport, Client) else transport
    if only is not None and behind is None:
        raise ValueError("only: there is nothing behind this pair that could answer the other calls")
    if capabilities is None:
        capabilities = ALL if behind is None else behind.get_capabilities()
    if behind is not None and not slots and behind.get_capabilities().slot_addressable:
        behind = SlotMapping(behind)  # it is asked in whole verbs
    backend = Backend()
    scripted = Scripted(backend, behind, only, replace(capabilities, slot_addressable=slots))
    chosen = layers
    if layers == ():
        # A call that nobody answers still ends by its time, as it does on every backend.
        chosen = None if settings.keys() - _OF_STACK else [partial(AttemptTimeout, attempt_timeout_s=math.inf)]
    return Pair(stack(scripted, chosen, **settings), backend)


#: Arguments of ``stack()`` that are no settings of a layer.
_OF_STACK = frozenset({"call_timeout_s", "claim_poll_s", "clock", "on_event", "retry_budget", "rng"})
