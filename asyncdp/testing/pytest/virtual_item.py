"""Runs tests with the marker ``virtual_time``.

The coroutine function of the test is called by :func:`~asyncdp.testing.clock.run_virtual`, on a new loop; the plugin
that would have run it sees a synchronous test.

pytest imports this module in every run, so it does not import the core.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

__all__ = ["end_with", "is_virtual", "parametrize", "replaced", "run_of"]

#: Name of the fixture by which a test is parametrized with its runs.
FIXTURE = "_virtual_run"
MARKER = "virtual_time"
BACKENDS = ("asyncio", "trio")
#: Virtual seconds after which a test counts as hung.
LIMIT_S = 3600.0
_ENDS = pytest.StashKey[list[Callable[[], Awaitable[None]]]]()


@dataclass(frozen=True)
class VirtualRun:
    """Parameters of one run of a test; as a string, the marker that repeats this run."""

    seed: int | None
    backend: str | None
    shuffle: bool | None = None
    limit_s: float = LIMIT_S

    def __str__(self) -> str:
        """Return the marker that repeats this run, without defaults."""
        said: dict[str, Any] = {"seed": self.seed, "backend": self.backend or BACKENDS[0], "shuffle": self.shuffle}
        if self.limit_s != LIMIT_S:
            said["limit_s"] = self.limit_s
        arguments = ", ".join(f"{name}={value!r}" for name, value in said.items() if value is not None)
        return f"run with @pytest.mark.virtual_time({arguments})"


def is_virtual(item: pytest.Item) -> bool:
    """Whether a test runs in virtual time."""
    return item.get_closest_marker(MARKER) is not None


def _runs(node: Any) -> list[VirtualRun]:
    """Return the runs that the marker of a test requests."""
    marker = node.get_closest_marker(MARKER)
    if marker is None:
        return []
    keys = {"seed", "backend", "shuffle", "limit_s"}
    if marker.args or marker.kwargs.keys() - keys:
        what = ", ".join([*map(repr, marker.args), *sorted(marker.kwargs.keys() - keys)])
        raise pytest.UsageError(f"{node.nodeid}: virtual_time takes {', '.join(sorted(keys))} by name, not {what}")
    rest = {key: marker.kwargs[key] for key in ("shuffle", "limit_s") if key in marker.kwargs}
    seeds, backends = (_several(marker.kwargs.get(key)) for key in ("seed", "backend"))
    for seed in seeds:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise pytest.UsageError(f"{node.nodeid}: virtual_time(seed=...) takes whole numbers, not {seed!r}")
    for backend in backends:
        if backend is not None and backend not in BACKENDS:
            raise pytest.UsageError(f"{node.nodeid}: virtual_time(backend=...) knows {BACKENDS}, not {backend!r}")
    for key, values in (("seed", seeds), ("backend", backends)):
        if not values:
            raise pytest.UsageError(
                f"{node.nodeid}: virtual_time({key}=...) got an empty list: the test would never run"
            )
    _check_rest(node, **rest)
    return [VirtualRun(seed, backend, **rest) for seed, backend in itertools.product(seeds, backends)]


def _check_rest(node: Any, *, shuffle: Any = None, limit_s: Any = LIMIT_S) -> None:
    """Check the arguments of the marker that are common to all runs."""
    if shuffle not in (None, True, False):
        raise pytest.UsageError(f"{node.nodeid}: virtual_time(shuffle=...) takes True or False, not {shuffle!r}")
    if isinstance(limit_s, bool) or not isinstance(limit_s, (int, float)) or not limit_s > 0:
        raise pytest.UsageError(f"{node.nodeid}: virtual_time(limit_s=...) takes positive seconds, not {limit_s!r}")


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test by its runs if the marker requests several."""
    runs = _runs(metafunc.definition)
    if len(runs) > 1:
        named = [(run.backend, None if run.seed is None else f"seed{run.seed}") for run in runs]
        ids = ["-".join(part for part in parts if part) for parts in named]
        metafunc.fixturenames.append(FIXTURE)
        metafunc.parametrize(FIXTURE, runs, ids=ids, indirect=True)


def run_of(item: pytest.Item) -> VirtualRun | None:
    """Return the run of a test; None if it does not run in virtual time."""
    if not is_virtual(item):
        return None
    callspec = getattr(item, "callspec", None)
    run: VirtualRun = (callspec.params.get(FIXTURE) if callspec is not None else None) or _runs(item)[0]
    if run.backend is None:
        backend = getattr(item, "funcargs", {}).get("anyio_backend", BACKENDS[0])
        name = backend if isinstance(backend, str) else backend[0]
        run = VirtualRun(run.seed, name, run.shuffle, run.limit_s)
    return run


def end_with(item: pytest.Item, end: Callable[[], Awaitable[None]]) -> None:
    """Register a coroutine function to be awaited at the end of the run, on its loop."""
    item.stash.setdefault(_ENDS, []).append(end)


@contextmanager
def replaced(item: pytest.Function) -> Iterator[None]:
    """Replace a test, during its call, by a plain function that runs it in virtual time."""
    run = run_of(item)
    if run is None:
        yield
        return
    test = item.obj
    while not inspect.iscoroutinefunction(test) and hasattr(test, "__wrapped__"):
        test = test.__wrapped__  # pytest-asyncio has wrapped it in a plain function
    if not inspect.iscoroutinefunction(test):
        pytest.fail(f"{item.name} has the marker virtual_time and is no async function", pytrace=False)
    for name, found in item._fixtureinfo.name2fixturedefs.items():  # noqa: SLF001 - pytest has no public way
        func = found[-1].func
        if inspect.iscoroutinefunction(func) or inspect.isasyncgenfunction(func):
            pytest.fail(
                f"{item.name} has the marker virtual_time, and the fixture {name!r} is async: it was set up on another "
                "event loop, in real time. Make what it gives in the test itself, with an async context manager.",
                pytrace=False,
            )
    before = item.obj
    item.obj = _plain(item, test, run)
    try:
        yield
    finally:
        item.obj = before


def _plain(item: pytest.Function, test: Callable[..., Awaitable[Any]], run: VirtualRun) -> Callable[..., None]:
    """Return a function that runs a test in virtual time."""

    def call(**kwargs: Any) -> None:
        import anyio

        from ..clock import run_virtual

        ends = item.stash.setdefault(_ENDS, [])

        async def main() -> None:
            try:
                await test(**kwargs)
            finally:
                with anyio.CancelScope(shield=True):
                    while ends:
                        await ends.pop()()

        shuffle = run.seed is not None if run.shuffle is None else run.shuffle
        run_virtual(main, run.backend or BACKENDS[0], run.seed or 0, shuffle=shuffle, limit_s=run.limit_s)

    return call
