"""Fixtures whose value is closed on the event loop of the test, after all fixtures that used it.

A client is bound to the loop that it is used on; closed from another loop it could not send its last requests. Async
fixtures would solve this, but each async plugin runs only its own kind of them. So a fixture marked with
:func:`closing` is written once, as a plain function, and converted to the kind of the plugin that runs the test.

pytest imports this module in every run, so it does not import the core.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import virtual_item

if TYPE_CHECKING:
    import pytest

    from asyncdp.client import Client

__all__ = ["Held", "closing", "replaced"]


@dataclass(frozen=True)
class Held:
    """The value of such a fixture, and the coroutine function to await after the test."""

    client: Client
    end: Callable[[], Awaitable[None]]


Make = Callable[..., Held]

#: Attribute of a fixture function that holds the plain function it was made from.
_MAKE = "_asyncdp_make"


def closing(make: Make) -> Callable[..., Any]:
    """Turn a function that creates a client into a fixture function that also closes it."""

    def plain(**kwargs: Any) -> Iterator[Client]:
        """Provide the client to a synchronous test, which has no event loop."""
        import anyio

        held = make(**kwargs)
        yield held.client
        anyio.run(held.end)

    setattr(plain, _MAKE, make)
    return _like(make, plain)


def _like(make: Make, fixture: Callable[..., Any]) -> Callable[..., Any]:
    """Give a fixture function the name, docstring and parameters of the one that it replaces."""
    fixture.__name__ = fixture.__qualname__ = make.__name__
    fixture.__doc__ = make.__doc__
    fixture.__signature__ = inspect.signature(make)  # type: ignore[attr-defined]
    return fixture


@contextmanager
def replaced(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[None]:
    """Set up a fixture of this kind in the form that the plugin of the test needs."""
    make = getattr(fixturedef.func, _MAKE, None)
    func = None if make is None else _for(make, request)
    if func is None:
        yield
        return
    before = fixturedef.func
    fixturedef.func = func  # type: ignore[misc]
    try:
        yield
    finally:
        fixturedef.func = before  # type: ignore[misc]


def _for(make: Make, request: pytest.FixtureRequest) -> Callable[..., Any] | None:
    """Return the fixture function for the requesting test; None: use the plain one."""
    item = request.node
    if virtual_item.is_virtual(item):
        return _ended_by_the_run(make, item)
    asyncio_plugin = request.config.pluginmanager.get_plugin("asyncio")
    if asyncio_plugin is not None and asyncio_plugin.is_async_test(item):
        return _by_pytest_asyncio(make, item)
    if "anyio_backend" in request.fixturenames and inspect.iscoroutinefunction(getattr(item, "obj", None)):
        return _by_anyio(make)
    return None


def _by_pytest_asyncio(make: Make, item: pytest.Item) -> Callable[..., Any]:
    """Return a fixture of pytest-asyncio, which makes the loop of the test current during the setup."""
    import asyncio

    import pytest_asyncio

    def fixture(**kwargs: Any) -> Iterator[Client]:
        loop = asyncio.get_event_loop()
        held = make(**kwargs)
        yield held.client
        loop.run_until_complete(held.end())

    marker = item.get_closest_marker("asyncio")
    scope = None if marker is None else marker.kwargs.get("loop_scope")
    scope = scope or item.config.getini("asyncio_default_test_loop_scope")
    pytest_asyncio.fixture(fixture, loop_scope=scope)  # type: ignore[type-var]
    return _like(make, fixture)


def _by_anyio(make: Make) -> Callable[..., Any]:
    """Return an async generator, which anyio's plugin runs on the loop of the test."""

    async def fixture(**kwargs: Any) -> AsyncIterator[Client]:
        held = make(**kwargs)
        yield held.client
        await held.end()

    return _like(make, fixture)


def _ended_by_the_run(make: Make, item: pytest.Item) -> Callable[..., Any]:
    """Return a plain function: in virtual time the loop ends with the test, so the run closes the client."""

    def fixture(**kwargs: Any) -> Client:
        held = make(**kwargs)
        virtual_item.end_with(item, held.end)
        return held.client

    return _like(make, fixture)
