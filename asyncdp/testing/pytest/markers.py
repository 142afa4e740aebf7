"""Evaluates the markers of a test that configure its plane."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest

from asyncdp.transports.memory.transport import DEFAULTS, MemoryTransport

from ..faults.plan import FaultPlan
from ..faults.rule import Rule
from ..faults.stacks import faulty_stack
from .loop_fixtures import Held
from .virtual_item import is_virtual

if TYPE_CHECKING:
    from .real_planes import RealPlane

__all__ = ["marked_plan", "memory_client", "real_client"]


def marked_plan(item: pytest.Item) -> FaultPlan:
    """Return a fresh plan from the marker ``faults``; an empty one without the marker.

    Raises:
        ValueError: The arguments of the marker are invalid; the message says why.
    """
    marker = item.get_closest_marker("faults")
    if marker is None:
        return FaultPlan()
    if unknown := marker.kwargs.keys() - {"seed"}:
        raise ValueError(f"{min(unknown)}: the marker faults takes a plan, JSON or rules, and seed")
    match marker.args:
        case (FaultPlan() as plan,):
            made = plan.fresh()
        case (str() as text,):
            made = FaultPlan.from_json(text)
        case ():
            raise ValueError("the marker faults takes one FaultPlan, its JSON, or rules; it was given none")
        case rules:
            made = FaultPlan(0, [_rule(rule) for rule in rules])
    return FaultPlan(marker.kwargs["seed"], made.rules) if "seed" in marker.kwargs else made


def _rule(given: Any) -> Rule:
    if isinstance(given, Rule):
        return given
    if isinstance(given, Mapping):
        return Rule.from_dict(given)
    raise ValueError(f"the marker faults takes one FaultPlan, its JSON, or rules, not {given!r:.80}")


def _settings(item: pytest.Item) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config and the layer settings of the marker ``data_plane``."""
    marker = item.get_closest_marker("data_plane")
    if marker is None:
        return {}, {}
    if marker.args:
        raise ValueError("the marker data_plane takes config={...} and settings of layers, by name")
    settings = dict(marker.kwargs)
    return dict(settings.pop("config", None) or {}), settings


def memory_client(item: pytest.Item, plan: FaultPlan) -> Held:
    """Return a client that owns a fresh memory plane."""
    config, settings = _settings(item)
    client = faulty_stack(MemoryTransport({**DEFAULTS, **config}), plan, **settings)
    return Held(client, client.close)


def real_client(item: pytest.Item, servers: RealPlane, plan: FaultPlan) -> Held:
    """Return a client of a plane on running servers."""
    if is_virtual(item):
        pytest.fail(f"{item.name}: real sockets do not go with virtual time; use data_plane", pytrace=False)
    backend = getattr(item, "callspec", None) and item.callspec.params.get("anyio_backend")  # type: ignore[attr-defined]
    if backend is not None and (backend if isinstance(backend, str) else backend[0]) != "asyncio":
        pytest.skip(f"{servers.name} is a library for asyncio")
    config, settings = _settings(item)
    client = faulty_stack(servers.transport(config), plan, **settings)

    async def end() -> None:
        try:
            await client.close()
        finally:
            await servers.empty()

    return Held(client, end)
