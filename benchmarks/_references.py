"""What works are measured beside, by name; each is opened once in a run, and ends with it."""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import numpy as np

__all__ = ["REFERENCES", "References", "Unavailable"]

Work = Callable[[], Awaitable[Any]]
MIB: Final = 1 << 20


class Unavailable(Exception):
    """A reference that cannot be had here."""


class References:
    """Opens references when they are first asked for.

    Args:
        stack: Ends them.
        without: Extras that are left out, such as ``ray``.
    """

    def __init__(self, stack: AsyncExitStack, without: tuple[str, ...] = ()) -> None:
        """Begin with none open."""
        self._stack = stack
        self._without = without
        self._open: dict[str, Any] = {}

    async def get(self, name: str, nbytes: int) -> Work:
        """Return the work of a reference, for so many bytes.

        Raises:
            Unavailable: What it needs is not installed, or left out.
        """
        needs, make = REFERENCES[name]
        if needs and needs in self._without:
            raise Unavailable(f"{name}: without {needs}")
        if needs and needs not in self._open:
            try:
                self._open[needs] = await self._stack.enter_async_context(OPENERS[needs]())
            except ImportError as error:
                raise Unavailable(f"{name}: {error}") from error
        return make(self._open.get(needs), nbytes)


# -- what they need


@asynccontextmanager
async def ray_here(num_cpus: int = 1, store_bytes: int = 1536 * MIB) -> AsyncIterator[Any]:
    """Start a Ray on loopback, unless one runs already."""
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    own = not ray.is_initialized()
    if own:
        ray.init(
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=store_bytes,
            log_to_driver=False,
            _node_ip_address="127.0.0.2",  # for 127.0.0.1 Ray takes the address of the network
        )
    try:
        yield ray
    finally:
        if own:
            ray.shutdown()


@asynccontextmanager
async def _valkey() -> AsyncIterator[Any]:
    from redis.asyncio import Redis

    from asyncdp.transports.ucxx.directory import EmbeddedServer

    server = EmbeddedServer()
    await server.start()
    client = Redis.from_url(server.url)
    try:
        yield client
    finally:
        await client.aclose()
        await server.stop()


@asynccontextmanager
async def _ucx() -> AsyncIterator[Any]:
    from asyncdp.transports.ucxx.wire.engine import Engine
    from benchmarks._ucxx_raw import raw_peer

    engine = Engine(devices="lo")
    try:
        async with raw_peer(engine) as raw:
            yield raw
    finally:
        await engine.close()


OPENERS: Final = {"ray": ray_here, "valkey": _valkey, "ucx": _ucx}


# -- what they do


def _copy(source: Any, target: Any) -> Work:
    async def copy() -> None:
        for begin in range(0, len(source), 16 * MIB):
            target[begin : begin + 16 * MIB] = source[begin : begin + 16 * MIB]

    return copy


def _memcpy(_: Any, nbytes: int) -> Work:
    return _copy(np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8))


def _fresh(_: Any, nbytes: int) -> Work:
    source = np.ones(nbytes, np.uint8)

    async def copy() -> float:
        with mmap.mmap(-1, nbytes) as pages:  # malloc would give memory that was used before
            began = time.perf_counter()
            target = np.frombuffer(pages, np.uint8)
            target[:] = source
            took = time.perf_counter() - began
            del target
        return took

    return copy


def _ring(_: Any, nbytes: int) -> Work:
    """Write into memory shared with other processes, at the next place of a ring; its pages were there before."""
    places, at = max(1, min(64, 512 * MIB // max(1, nbytes))), 0
    file = os.memfd_create("asyncdp-ring")
    os.ftruncate(file, places * nbytes)
    pages = mmap.mmap(file, places * nbytes)
    os.close(file)
    ring, source = np.frombuffer(pages, np.uint8).reshape(places, nbytes), np.ones(nbytes, np.uint8)
    ring[:] = 1

    async def write() -> None:
        nonlocal at
        ring[at] = source
        at = (at + 1) % places

    return write


def _ray_put(ray: Any, nbytes: int) -> Work:
    source = np.ones(nbytes, np.uint8)

    async def put() -> float:
        began = time.perf_counter()
        held = ray.put(source)
        took = time.perf_counter() - began
        del held
        return took

    return put


def _ray_view(ray: Any, nbytes: int) -> Work:
    held = ray.put(np.ones(nbytes, np.uint8))

    async def view() -> None:
        ray.get(held)

    return view


def _ray_get(ray: Any, nbytes: int) -> Work:
    held, target = ray.put(np.ones(nbytes, np.uint8)), np.zeros(nbytes, np.uint8)

    async def get() -> None:
        target[:] = ray.get(held)

    return get


def _valkey_trip(client: Any, _: int) -> Work:
    return client.ping  # type: ignore[no-any-return]


def _ucx_send(raw: Any, nbytes: int) -> Work:
    return lambda: raw.send(nbytes)


def _ucx_receive(raw: Any, nbytes: int) -> Work:
    return lambda: raw.receive(nbytes)


async def _nothing() -> None:
    await asyncio.sleep(0)


#: By name: what it needs, and its work for so many bytes.
REFERENCES: Final[dict[str, tuple[str, Callable[[Any, int], Work]]]] = {
    "memcpy": ("", _memcpy),
    "memcpy, fresh pages": ("", _fresh),
    "ring": ("", _ring),
    "ray put": ("ray", _ray_put),
    "ray get": ("ray", _ray_get),
    "ray view": ("ray", _ray_view),
    "valkey round trip": ("valkey", _valkey_trip),
    "raw ucx": ("ucx", _ucx_send),
    "raw ucx, received": ("ucx", _ucx_receive),
    "turn of the loop": ("", lambda _, __: _nothing),
}
