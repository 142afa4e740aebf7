"""The faults: each hurts one process of the plane while every verb is under way, and heals what can be healed."""

from __future__ import annotations

import asyncio
import functools
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncdp.errors import DataPlaneError
from tests.chaos.ucxx_garbage import shower
from tests.chaos.ucxx_plane import descriptors
from tests.chaos.ucxx_verbs import TIMEOUT_S

if TYPE_CHECKING:
    from tests.chaos.ucxx_world import World

__all__ = ["FAULTS", "Fault"]

PAUSE_S = 3.0
LOCAL = "127.0.0.1"


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: As it is called on the command line.
        act: Does it; returns what was seen.
        ask: What is asked, once, to see when it is noticed; None: nobody who asks can notice it.
        needs_ucx: Whether it is about the UCX listener.
    """

    name: str
    act: Callable[[World], Awaitable[str]]
    ask: Callable[[World], Callable[[], Awaitable[Any]]] | None = None
    needs_ucx: bool = False


async def _pause(world: World, pid: int) -> None:
    import os

    os.kill(pid, signal.SIGSTOP)
    world.hit()
    try:
        await asyncio.sleep(PAUSE_S)
    finally:
        os.kill(pid, signal.SIGCONT)


async def pause_host(world: World) -> str:
    """SIGSTOP a slot host, SIGCONT it later."""
    await _pause(world, world.plane.hosts[0].process.pid)
    return ""


async def kill_host(world: World) -> str:
    """SIGKILL a slot host; its next life adopts its arena."""
    host = world.plane.hosts[0]
    world.hit()
    await host.kill()
    await world.plane.start_host(0)
    told = world.plane.hosts[0].told
    assert told["epoch"] == host.told["epoch"], "the arena was not adopted"
    return f"epoch {told['epoch']} as before"


async def pause_directory(world: World) -> str:
    """SIGSTOP the directory, SIGCONT it later."""
    assert world.plane.server.pid is not None
    await _pause(world, world.plane.server.pid)
    return ""


async def kill_directory(world: World) -> str:
    """SIGKILL the directory; it is started again from its append-only file."""
    world.hit()
    world.plane.server.kill()
    await asyncio.sleep(1.0)
    await world.plane.server.start()
    return ""


async def pause_worker(world: World) -> str:
    """SIGSTOP a rollout worker, SIGCONT it later."""
    await _pause(world, world.plane.roles["worker"].process.pid)
    return ""


async def pause_trainer(world: World) -> str:
    """SIGSTOP a trainer, SIGCONT it later."""
    await _pause(world, world.plane.roles["trainer"].process.pid)
    return ""


async def kill_worker(world: World) -> str:
    """SIGKILL a rollout worker in the middle of a put; another one takes its place."""
    world.hit()
    worker = world.plane.roles["worker"]
    worker.signal(signal.SIGUSR1)
    code = await worker.gone()
    assert code == -signal.SIGKILL, f"the worker ended with {code}"
    await world.plane.start_role("worker")
    return "in the middle of a put"


async def kill_trainer(world: World) -> str:
    """SIGKILL a trainer that holds a claim: the controller finds it and gives it back; another one takes its place."""
    world.hit()
    trainer = world.plane.roles["trainer"]
    trainer.signal(signal.SIGUSR1)
    code = await trainer.gone()
    assert code == -signal.SIGKILL, f"the trainer ended with {code}"
    owner = trainer.told["owner"]
    claims = await world.client.list_claims("rollouts", "train", timeout_s=TIMEOUT_S)
    rows = sum(len(claim.sample_ids) for claim in claims if claim.owner == owner)
    assert rows, "the dead trainer's claim is not listed"
    await world.client.release_claims("rollouts", owner, timeout_s=TIMEOUT_S)
    world.released.add(owner)
    await world.plane.start_role("trainer")
    return f"{rows} rows of its claim given back"


async def _port(world: World, number: signal.Signals) -> str:
    host = world.plane.hosts[1]
    host.signal(number)
    world.hit()
    await asyncio.sleep(PAUSE_S)
    host.signal(signal.SIGHUP)
    return ""


mute_port = functools.partial(_port, number=signal.SIGUSR1)
close_port = functools.partial(_port, number=signal.SIGUSR2)


async def _opened(world: World, host: int) -> int:
    """Descriptors of a host, once those of the strangers are closed."""
    await asyncio.sleep(0.5)
    return descriptors(world.plane.hosts[host].process.pid)


async def garbage(world: World) -> str:
    """Garbage at a control port."""
    told = world.plane.hosts[0].told
    before = await _opened(world, 0)
    world.hit()
    made = 0
    for seed in range(4):
        made += await asyncio.to_thread(shower, (LOCAL, told["ports"][0]), 4, seed)
    after = await _opened(world, 0)
    assert after <= before + 8, f"{after - before} descriptors more"  # the pool of a client may have grown
    return f"{made} strangers, descriptors {before} -> {after}"


async def garbage_ucx(world: World) -> str:
    """Garbage at a UCX listener: its worker spins until the host replaces it."""
    async with world.pool.use(LOCAL, world.plane.hosts[0].told["ports"][0]) as connection:
        port = connection.welcome.ucx_port
    before = await _opened(world, 0)
    world.hit()
    made = await asyncio.to_thread(shower, (LOCAL, port), 2, 1)
    await asyncio.sleep(4.0)  # the watch looks every half second and wants to see it twice
    after = await _opened(world, 0)
    return f"{made} strangers, descriptors {before} -> {after}"


async def _lost(world: World, *, again: bool) -> str:
    await world.plane.hosts[1].kill()
    if again:
        epoch = world.plane.hosts[1].told["epoch"]
        await world.plane.start_host(1, adopt=False)
        assert world.plane.hosts[1].told["epoch"] > epoch, "it has its former life's epoch"
    return f"{await world.evict_lost()} rows named as lost and evicted"


async def renew_host(world: World) -> str:
    """SIGKILL a slot host; its next life has adoption off: all its rows are lost."""
    world.hit(lossy=True)
    return await _lost(world, again=True)


async def lose_host(world: World) -> str:
    """SIGKILL a slot host for good: its rows are lost, the rest is served."""
    world.hit(lossy=True)
    return await _lost(world, again=False)


def _host(number: int, port: int = 0) -> Callable[[World], Callable[[], Awaitable[Any]]]:
    return lambda world: lambda: world.ask_port(number, port)


def _directory(world: World) -> Callable[[], Awaitable[Any]]:
    return world.ask_directory


#: In an order in which each finds what it needs.
FAULTS = [
    Fault("pause host", pause_host, _host(0)),
    Fault("kill host", kill_host, _host(0)),
    Fault("pause directory", pause_directory, _directory),
    Fault("kill directory", kill_directory, _directory),
    Fault("kill worker", kill_worker),
    Fault("pause worker", pause_worker),
    Fault("kill trainer", kill_trainer),
    Fault("pause trainer", pause_trainer),
    Fault("mute port", mute_port, _host(1)),
    Fault("close port", close_port, _host(1)),
    Fault("garbage", garbage),
    Fault("garbage at ucx", garbage_ucx, needs_ucx=True),
    Fault("renew host", renew_host, _host(1)),
    Fault("lose host", lose_host, _host(1)),
]


async def strike(world: World, fault: Fault) -> None:
    """Do one fault with every verb under way; the world's tally has what came of it."""
    tally = world.begin(fault.name)
    over = asyncio.Event()

    async def act() -> None:
        await asyncio.sleep(0.3)
        try:
            tally.afterwards = await fault.act(world)
        except DataPlaneError as err:
            tally.wrong.append(f"the controller could not do its part: {err!r}")
        await asyncio.sleep(0.7)
        over.set()

    with tally.ticking():
        async with asyncio.TaskGroup() as group:
            group.create_task(world.verbs.until(over))
            group.create_task(act())
            if fault.ask is not None:
                group.create_task(world.notice(fault.ask(world), over))
    await world.until_well()
    world.verbs.may_lose = False
