"""The rig of the contract's tests: planes under test and clients of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

import anyio
import pytest
from tensordict import TensorDict

from asyncdp import DataPlaneCapabilities, default_layers, stack
from asyncdp.factory import DEFAULT_LAYERS

if TYPE_CHECKING:
    from asyncdp import KVBatchMeta
    from asyncdp.client import Client

__all__ = ["BASE", "Opener", "Plane", "Rig", "at_once", "by_config", "declare", "table", "until"]

#: Keys that every config requires.
BASE: Mapping[str, Any] = {
    "enabled": True,
    "impl": "memory",
    "backend": "simple",
    "storage_capacity": 1 << 20,
    "num_storage_units": 2,
    "claim_meta_poll_interval_s": 0.01,
}
#: Layer settings with the shortest pauses between retries, because the suite tests that they happen, not how long they
#: wait; reconciliation in ``close()`` gets the time that it needs on a busy machine.
FAST: Mapping[str, Any] = {"backoff_base_s": 0.001, "round_backoff_base_s": 0.001, "close_timeout_s": 20.0}
#: Seconds after which a hanging step of a test fails.
PATIENCE_S = 60.0


@dataclass(eq=False)
class Plane:
    """A plane that was started for a test.

    Attributes:
        transport: The transport without layers that owns the plane; closing it ends the plane.
        attach: Creates another transport without layers on the same plane; its argument is a dict of config keys to
            override (``owner``, ``claim_lease_s``, ...).
        leftovers: Returns what calls left behind in the plane by name (slots that are still being written or read,
            ...); empty if there is nothing or if it cannot be inspected.
    """

    transport: Any
    attach: Callable[[dict[str, Any]], Any]
    leftovers: Callable[[], dict[str, int]] = dict


#: A function that returns an async context manager, which opens a fresh plane and closes it; its argument is a dict of
#: config keys to override (``storage_capacity``, ``num_storage_units``, ``owner``, ``claim_lease_s``,
#: ``group_id_pattern``, ``strict_schema``, ...).
Opener = Callable[[dict[str, Any]], AbstractAsyncContextManager[Plane]]


def by_config(
    kind: Callable[..., Any], *, leftovers: Callable[[Any], Callable[[], dict[str, int]]] | None = None, **config: Any
) -> Opener:
    """Return an opener for transports with the constructor of those of asyncdp, ``kind(config, bootstrap=True)``.

    Args:
        kind: Class of the transport. A second client of a plane is ``kind(first.attach_config(), bootstrap=False)``.
        leftovers: Called with the transport that owns a new plane; returns the ``leftovers`` of its :class:`Plane`.
        **config: Config keys that override or extend ``BASE``: ``impl``, and the mapping of that name.
    """

    @asynccontextmanager
    async def opened(differing: dict[str, Any]) -> AsyncIterator[Plane]:
        whole = {**BASE, **config, **differing}
        for name in config.keys() & differing.keys():
            if isinstance(config[name], Mapping):
                whole[name] = {**config[name], **differing[name]}
        transport = kind(whole)

        def attach(differing: dict[str, Any]) -> Any:
            return kind({**transport.attach_config(), **differing}, bootstrap=False)

        yield Plane(transport, attach, leftovers(transport) if leftovers else dict)

    return opened


@dataclass
class Rig:
    """Opens planes of one transport and clients with the default layers; each test gets a new rig.

    ``client`` owns a fresh plane, ``mate`` is a second client of it under another owner name. ``open`` and ``attach``
    create more, with fault layers below the default ones. All are closed at the end of the test, and the planes are
    checked for leftovers.

    Attributes:
        opener: Opens a plane.
        without: Names of default layers to leave out.
    """

    opener: Opener
    without: tuple[str, ...] = ()
    client: Client = field(init=False)
    mate: Client = field(init=False)
    _planes: dict[Client, Plane] = field(default_factory=dict, init=False)
    _clients: list[Client] = field(default_factory=list, init=False)
    _ended: list[Plane] = field(default_factory=list, init=False)
    _ends: list[AbstractAsyncContextManager[Plane]] = field(default_factory=list, init=False)

    async def __aenter__(self) -> Self:
        if unknown := set(self.without) - DEFAULT_LAYERS.keys():
            raise ValueError(f"unknown layers {sorted(unknown)}; there are {sorted(DEFAULT_LAYERS)}")
        self.client = await self.open(owner="owner")
        self.mate = await self.attach(owner="mate")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with anyio.CancelScope(shield=True):
            try:
                with anyio.fail_after(PATIENCE_S):
                    for client in reversed(self._clients):
                        await client.close()
            finally:
                with anyio.fail_after(PATIENCE_S):
                    for end in reversed(self._ends):
                        await end.__aexit__(None, None, None)
        if kind is None:
            self.check_nothing_left()

    async def open(self, *faults: Callable[[Client], Any], **config: Any) -> Client:
        """Open another plane and return the client that owns it."""
        end = self.opener(config)
        plane = await end.__aenter__()
        self._ends.append(end)
        return self._stacked(plane.transport, plane, faults)

    async def attach(
        self,
        *faults: Callable[[Client], Any],
        to: Client | None = None,
        settings: Mapping[str, Any] | None = None,
        **config: Any,
    ) -> Client:
        """Return another client of the plane of ``to`` (default: ``client``), with ``settings`` for its layers."""
        plane = self._planes[self.client if to is None else to]
        return self._stacked(plane.attach(config), plane, faults, settings)

    def _stacked(
        self,
        transport: Any,
        plane: Plane,
        faults: tuple[Callable[[Client], Any], ...],
        settings: Mapping[str, Any] | None = None,
    ) -> Client:
        named = zip(DEFAULT_LAYERS, default_layers(**{**FAST, **(settings or {})}), strict=True)
        client = stack(transport, [*(layer for name, layer in named if name not in self.without), *faults])
        self._planes[client] = plane
        self._clients.append(client)
        return client

    def lose(self, client: Client) -> None:
        """Drop the rig's references to a client without closing it, as a program may do."""
        del self._planes[client]
        self._clients.remove(client)

    def plane(self, client: Client | None = None) -> Plane:
        """Return the plane of a client (default: ``client``)."""
        return self._planes[self.client if client is None else client]

    def transport(self, client: Client | None = None) -> Any:
        """Return the bare transport that owns the plane of a client."""
        return self.plane(client).transport

    def need(self, *capabilities: str) -> None:
        """Skip the test where the backend lacks one of the capabilities."""
        has = self.client.get_capabilities()
        known = {f.name for f in fields(DataPlaneCapabilities)}
        for name in capabilities:
            assert name in known, f"no capability is called {name!r}"
            if not getattr(has, name):
                pytest.skip(f"the capabilities of the transport say: no {name}")

    def rows_of(self, meta: KVBatchMeta) -> KVBatchMeta | list[str]:
        """Return the argument to remove the rows of a meta: the meta, or ids if the backend cannot bind to lives."""
        return meta if self.client.get_capabilities().bound_mutations else meta.sample_ids

    async def end(self, owner: Client) -> None:
        """Close the owner of a plane; pending outcomes of its other clients cannot be reconciled after that."""
        self._ended.append(self._planes[owner])
        await owner.close()

    def leftovers(self) -> dict[str, int]:
        """Return what calls left behind in the planes, by name."""
        return {name: count for plane in self._planes.values() for name, count in plane.leftovers().items()}

    def check_nothing_left(self) -> None:
        """Fail if a slot is still being written or read, or an outcome is still pending."""
        assert not self.leftovers()
        for client in self._clients:
            if self._planes[client] not in self._ended:
                assert not [outcome.call for outcome in client.env.pending_outcomes]


async def declare(client: Client, *names: str, tasks: tuple[str, ...] = ("train",), **more: Any) -> None:
    """Register partition ``p`` with these fields (default: ``x``)."""
    await client.register_partition("p", names or ("x",), 64, tasks, **more)


def table(n: int | None = None, **leaves: Any) -> TensorDict:
    """Return a TensorDict of ``n`` rows; default: the number of rows of its first leaf."""
    return TensorDict(leaves, batch_size=[len(next(iter(leaves.values()))) if n is None else n])


async def at_once(*calls: Awaitable[Any]) -> list[Any]:
    """Await calls concurrently; return the result or error of each, in order."""
    results: list[Any] = [None] * len(calls)

    async def one(at: int, call: Awaitable[Any]) -> None:
        try:
            results[at] = await call
        except Exception as err:  # noqa: BLE001 - looked at by the caller
            results[at] = err

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as group:
            for at, call in enumerate(calls):
                group.start_soon(one, at, call)
    return results


async def until(true: Callable[[], Any]) -> None:
    """Wait until ``true()`` returns a true value."""
    with anyio.fail_after(PATIENCE_S):
        while not true():  # noqa: ASYNC110 - there is no event for what a test looks at from outside
            await anyio.sleep(0.001)
