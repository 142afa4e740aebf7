"""Who is told of dead rows, and what becomes of news that could not be brought."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("msgpack", reason="needs the extra: pip install 'asyncdp[ucxx]'")
pytest.importorskip("redis", reason="needs the extra: pip install 'asyncdp[ucxx]'")

from asyncdp.calls.slots import HostRef
from asyncdp.errors import DataPlaneUnavailable, StaleSlotError
from asyncdp.transports.ucxx.client.host_resolver import Place
from asyncdp.transports.ucxx.client.invalidation import Invalidator
from asyncdp.transports.ucxx.directory import DeadCells, HostInfo, SlotName

pytestmark = pytest.mark.anyio
CTX: Any = None


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The transport is asyncio's."""
    return "asyncio"


def dead(host: str = "h", slot: int = 1) -> DeadCells:
    """A row of a slot."""
    return DeadCells(SlotName(host, 1, slot, 1), (0,))


def refused() -> Exception:
    """Return the error of a port at which no process listens."""
    return DataPlaneUnavailable("refused", cause=ConnectionRefusedError())


class Hosts:
    """Stands for HostResolver: hosts of two ports, told how to answer a notice of dead rows."""

    def __init__(self, *, alive: bool = True, **does: Callable[[int], Exception | None]) -> None:
        self.does = does
        self.alive = alive
        self.moves: list[Place] = []
        self.told: list[tuple[str, int, int]] = []
        self.host_client = SimpleNamespace(drop=self.drop)

    async def find(self, host: HostRef) -> Place | None:
        """Where it is."""
        if host.id not in self.does:
            return None
        return Place(HostInfo(host.id, host.epoch, "127.0.0.1", (1, 2), alive=self.alive))

    def forget(self, host: HostRef) -> None:
        """Nothing is kept."""

    async def moved(self, host: HostRef, before: Place) -> Place | None:
        """Where it is by now."""
        return self.moves.pop() if self.moves else None

    async def drop(self, host: HostRef, door: Any, news: Any, port: int) -> None:
        """Hear, or fail."""
        del door
        await asyncio.sleep(0)
        problem = self.does[host.id](port)
        if problem is not None:
            raise problem
        self.told += [(host.id, slot, port) for slot, *_ in news]


async def test_each_host_is_told_of_its_own() -> None:
    """Once each, before tell() returns."""
    hosts = Hosts(h=lambda _: None, g=lambda _: None)
    await Invalidator(hosts).tell([dead("h", 1), dead("g", 2), dead("h", 3)], CTX)
    assert sorted(hosts.told) == [("g", 2, 1), ("h", 1, 1), ("h", 3, 1)]


async def test_a_broken_port_is_passed_by() -> None:
    """The next one is as good."""
    hosts = Hosts(h=lambda port: DataPlaneUnavailable("reset") if port == 1 else None)
    await Invalidator(hosts).tell([dead()], CTX)
    assert hosts.told == [("h", 1, 2)]


@pytest.mark.parametrize(
    ("alive", "problem"),
    [(True, refused), (False, lambda: DataPlaneUnavailable("mute")), (True, lambda: StaleSlotError("another life"))],
    ids=["refused everywhere", "silent for long", "another life"],
)
async def test_a_dead_host_holds_nobody_up(alive: bool, problem: Callable[[], Exception]) -> None:  # noqa: FBT001
    """It cannot serve what died; its reconciliation does the rest."""
    invalidator = Invalidator(Hosts(alive=alive, h=lambda _: problem()))
    await invalidator.tell([dead()], CTX)
    await invalidator.tell([dead("nobody")], CTX)


async def test_a_host_that_moved_is_told_where_it_is_now() -> None:
    """Another host answers at its old ports: it does not hear of the death in the other's stead."""
    hosts = Hosts(h=lambda port: StaleSlotError("another host") if port < 3 else None)
    hosts.moves = [Place(HostInfo("h", 1, "127.0.0.1", (3, 4)))]
    await Invalidator(hosts).tell([dead()], CTX)
    assert hosts.told == [("h", 1, 3)]


async def test_a_host_that_lives_and_does_not_answer_is_an_error_and_is_told_later() -> None:
    """It may still serve the rows: a clear must not say that it has cleared."""
    does = {"h": lambda _: DataPlaneUnavailable("reset")}
    hosts = Hosts(**does)
    invalidator = Invalidator(hosts)
    with pytest.raises(DataPlaneUnavailable) as caught:
        await invalidator.tell([dead()], CTX)
    assert caught.value.ambiguous
    assert caught.value.retryable
    hosts.does = {"h": lambda _: None, "g": lambda _: None}
    await invalidator.tell([dead("g", 5)], CTX)
    assert sorted(hosts.told) == [("g", 5, 1), ("h", 1, 1)]
    await invalidator.tell([], CTX)
    assert len(hosts.told) == 2


async def test_news_of_a_cancelled_call_are_told_with_the_next() -> None:
    """The cancel is not held up, and nothing is forgotten."""
    hosts = Hosts(h=lambda _: None)
    invalidator = Invalidator(hosts)
    task = asyncio.ensure_future(invalidator.tell([dead()], CTX))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not hosts.told
    await invalidator.tell([dead(slot=2)], CTX)
    assert sorted(hosts.told) == [("h", 1, 1), ("h", 2, 1)]


async def test_a_host_that_was_told_late_fails_nobody_elses_call() -> None:
    """What it missed before is not this call's."""
    hosts = Hosts(h=lambda _: DataPlaneUnavailable("reset"), g=lambda _: None)
    invalidator = Invalidator(hosts)
    with pytest.raises(DataPlaneUnavailable):
        await invalidator.tell([dead()], CTX)
    await invalidator.tell([dead("g", 2)], CTX)
    assert hosts.told == [("g", 2, 1)]
