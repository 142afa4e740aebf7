"""Which hosts are told of dead rows, and what a host that does not answer means for the mutation."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("msgpack", reason="needs the extra: pip install 'asyncdp[ucxx]'")
pytest.importorskip("redis", reason="needs the extra: pip install 'asyncdp[ucxx]'")

from asyncdp.calls.slots import Abort, HostRef, Invalidate, SlotRef
from asyncdp.errors import DataPlaneUnavailable, StaleSlotError
from asyncdp.transports.ucxx.client import host_resolver
from asyncdp.transports.ucxx.client.host_resolver import HostResolver
from asyncdp.transports.ucxx.client.invalidation import invalidations
from asyncdp.transports.ucxx.client.slot_calls import SlotCalls
from asyncdp.transports.ucxx.directory import DeadCells, HostInfo, SlotName

pytestmark = pytest.mark.anyio
CTX: Any = SimpleNamespace(attempt=1)
HOST = HostRef("h", 1, (1, 2))
Answer = Callable[[int], Exception | None]


def refused(_: int) -> Exception:
    """Return the error of a port at which no process listens."""
    return DataPlaneUnavailable("refused", cause=ConnectionRefusedError())


class Transport(SlotCalls):
    """The slot calls over a directory and hosts that answer as a test says."""

    def __init__(self, answer: Answer, *infos: HostInfo) -> None:
        super().__init__()
        self.infos, self.answer, self.looked = infos, answer, 0
        self.told: list[tuple[str, Any, int | None]] = []
        resolver = self._resolver = HostResolver.__new__(HostResolver)
        resolver._addresses, resolver._asked = {}, True
        resolver._directory = SimpleNamespace(hosts=self.hosts)  # type: ignore[assignment]
        client = SimpleNamespace(drop=self.drop, abort=self.abort)
        resolver.__class__ = type("Resolver", (HostResolver,), {"host_client": client})

    async def hosts(self) -> tuple[HostInfo, ...]:
        """What is registered."""
        self.looked += 1
        return self.infos

    async def drop(self, host: HostRef, route: Any, rows: Any, port: int | None) -> None:
        """Answer."""
        await asyncio.sleep(0)
        problem = self.answer(port or 0)
        if problem is not None:
            raise problem
        self.told.append((route.address, rows, port))

    async def abort(self, host: HostRef, route: Any, op_id: str, port: int | None) -> None:
        """As drop."""
        await self.drop(host, route, op_id, port)


def here(*, alive: bool = True, epoch: int = 1, ports: tuple[int, ...] = (1, 2)) -> HostInfo:
    """The entry of the host."""
    return HostInfo("h", epoch, "here", ports, alive=alive)


def invalidate(port: int | None = 1, host: HostRef = HOST) -> Invalidate:
    """One row of one slot."""
    return Invalidate(host, (SlotRef(host, 7, 3, (), (0,), ()),), port)


@pytest.fixture(autouse=True)
def listens(monkeypatch: pytest.MonkeyPatch) -> dict[int, bool]:
    """The ports at which a process listens; all, unless a test says otherwise."""
    open_ports = {1: True, 2: True}

    async def accepts(address: str, ports: tuple[int, ...]) -> bool:
        return any(open_ports.get(port, True) for port in ports)

    monkeypatch.setattr(host_resolver, "accepts", accepts)
    return open_ports


async def test_a_host_is_told_slots_generations_and_rows() -> None:
    """Through the port that was chosen, with one look at the directory for all that follow."""
    transport = Transport(lambda _: None, here())
    for port in (1, 2):
        await transport._invalidate(invalidate(port), CTX)
    assert transport.told == [("here", [(7, 3, (0,), ())], 1), ("here", [(7, 3, (0,), ())], 2)]
    assert transport.looked == 1


async def test_a_host_whose_ports_were_not_known_is_found() -> None:
    """Each attempt takes another of its ports."""
    transport = Transport(lambda _: None, here())
    for attempt in (1, 2):
        await transport._invalidate(invalidate(None, HostRef("h", 1, ())), SimpleNamespace(attempt=attempt))  # type: ignore[arg-type]
    assert [port for *_, port in transport.told] == [1, 2]


@pytest.mark.parametrize(
    "info", [here(alive=False), here(epoch=2), None], ids=["silent for long", "began anew", "gone"]
)
async def test_a_host_that_cannot_serve_is_not_asked(info: HostInfo | None) -> None:
    """It frees the rows itself: nobody waits for it."""
    transport = Transport(lambda _: None, *([info] if info else []))
    await transport._invalidate(invalidate(), CTX)
    assert not transport.told


async def test_a_host_that_refuses_everywhere_holds_nobody_up(listens: dict[int, bool]) -> None:
    """Its heartbeat is recent, but no process listens at any of its ports."""
    transport = Transport(refused, here())
    transport._resolver.know((here(),))
    listens.update({1: False, 2: False})
    await transport._invalidate(invalidate(), CTX)


async def test_one_port_that_refuses_is_an_error_of_the_port(listens: dict[int, bool]) -> None:
    """The host serves by the other one, so PortRotation has to go on."""
    transport = Transport(lambda port: refused(port) if port == 1 else None, here())
    listens[1] = False
    with pytest.raises(DataPlaneUnavailable) as caught:
        await transport._invalidate(invalidate(), CTX)
    assert caught.value.retryable
    assert caught.value.blames_port
    await transport._invalidate(invalidate(2), CTX)
    assert len(transport.told) == 1


@pytest.mark.parametrize("call", [invalidate(), Abort(HOST, "op", 1)], ids=["Invalidate", "Abort"])
async def test_a_host_that_moved_is_asked_again_by_the_layers(call: Any) -> None:
    """Another host answers at its old port: this attempt fails retryably, and the next one goes to the new place."""
    transport = Transport(lambda port: StaleSlotError("another host") if port == 1 else None, here(ports=(3, 4)))
    transport._resolver.know((here(),))
    for ends in (False, True):
        if not ends:
            with pytest.raises(DataPlaneUnavailable, match="has moved") as caught:
                await transport.execute(call, CTX)
            assert caught.value.retryable
        else:
            await transport.execute(call, CTX)
    assert transport.told[0][2] in (3, 4)


async def test_a_host_that_did_not_answer_in_time_is_looked_up_again() -> None:
    """The attempt was cut off; the next one learns from the directory that the host is down."""
    transport = Transport(lambda _: None, here(alive=False))
    transport._resolver.know((here(),))
    task = asyncio.ensure_future(transport._invalidate(invalidate(), CTX))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await transport._invalidate(invalidate(), CTX)
    assert transport.looked == 1
    assert not transport.told


async def test_a_host_that_answers_nothing_is_waited_for_until_it_counts_as_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A paused host; the next caller asks the directory first, and tells the host once that is alive again."""
    monkeypatch.setattr(host_resolver, "LOOK_S", 0.01)
    transport = Transport(lambda _: None, here())
    paused = asyncio.Event()

    async def drop(*_: Any) -> None:
        paused.set()
        await asyncio.sleep(600)

    async def pause() -> None:
        await paused.wait()
        seen = transport.looked
        while transport.looked < seen + 2:  # noqa: ASYNC110 - it is alive still, as far as its heartbeats tell
            await asyncio.sleep(0)
        transport.infos = (here(alive=False),)

    resolver: Any = type(transport._resolver)
    with monkeypatch.context() as patch:
        patch.setattr(resolver, "host_client", SimpleNamespace(drop=drop))
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(pause())
            await transport._invalidate(invalidate(), CTX)
        await transport._invalidate(invalidate(), CTX)
    assert not transport.told
    transport.infos = (here(),)
    await transport._invalidate(invalidate(), CTX)
    assert len(transport.told) == 1


def test_dead_cells_become_one_call_for_each_host() -> None:
    """With the ports that are known."""
    directory: Any = SimpleNamespace(host_ref=lambda name, epoch: HostRef(name, epoch, (5,) if name == "h" else ()))
    cells = [
        DeadCells(SlotName("h", 1, 1, 1), (0, 2)),
        DeadCells(SlotName("g", 1, 2, 1), (0,)),
        DeadCells(SlotName("h", 1, 3, 9), (1,), ("x",)),
    ]
    first, second = invalidations(cells, directory)
    assert (first.host, second.host) == (HostRef("h", 1, (5,)), HostRef("g", 1, ()))
    assert [(ref.slot, ref.generation, ref.index, ref.fields) for ref in first.refs] == [
        (1, 1, (0, 2), ()),
        (3, 9, (1,), ("x",)),
    ]
