"""A SingleController with its pumps, killed and started again: run it with ``asyncdp demo --controller``.

Controller, rollout workers, scorer and trainer are processes (on the memory transport: tasks) that meet in the plane
only. The driver here starts the plane and the roles, kills what it is told to, starts it again, and makes the account:
each group that was committed was trained once, was evicted, or is left. Read on in this order:

    controller_roles     what each role does; the controller is a CapacityLedger, a Selector and a RecoveryLoop
    controller_journal   "trained" means journalled with a durable weight version; and the account
    controller_checkpoints   what is left when all processes are killed and the memory of the plane is gone
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import time
from contextlib import AsyncExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from asyncdp import Client, DataPlaneError, layers_of
from asyncdp.examples.controller_checkpoints import Checkpoints, destroy
from asyncdp.examples.controller_journal import Journal, Tally
from asyncdp.examples.controller_roles import PARTITION, Part, declare, main, play
from asyncdp.examples.grpo_chaos import plane_of
from asyncdp.examples.grpo_plane import DemoConfig, start
from asyncdp.recovery.reservations import Listing

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["KILLS", "run"]

WORKERS = 2
ROLES = ("controller", *(f"worker-{number}" for number in range(WORKERS)), "scorer", "trainer")
ALL = "all"
"""All roles and the plane with its memory: the run goes on from the last checkpoint. "random" leaves it out."""
KILLS = {
    "memory": ("controller", "worker", "scorer", "trainer", "host", ALL),
    "transfer_queue": ("controller", "worker", "scorer", "trainer", "storage"),
    "ucxx": ("controller", "worker", "scorer", "trainer", "host", "directory", ALL),
}
"""What can be killed on each transport, beside "random". A storage unit of TransferQueue does not come back."""
CHECKPOINT_S = 1.5
"""Seconds between two checkpoints where everything is killed, unless another number is given."""
AWAY_S = 1.0
"""Seconds before what was killed is started again."""
CALM_S = 2.0
"""Seconds of training before the next kill."""
START_S = 600.0
"""Seconds that the first training step may take: each process imports torch, and they share the cores."""
RECOVERY_S = 300.0
"""Seconds after a kill in which the next group has to be trained."""
DRAIN_S = 5.0
"""Seconds for what is under way when the time is over."""


@dataclass
class ControllerReport:
    """What a run came to.

    Attributes:
        tally: The account.
        killed: What was killed, and the seconds from the kill to the next training step.
        steps: Number of training steps.
    """

    tally: Tally
    killed: list[tuple[str, float]] = field(default_factory=list)
    steps: int = 0

    @property
    def went_on(self) -> bool:
        """Whether training went on after each kill."""
        return all(seconds < RECOVERY_S for _, seconds in self.killed) and self.steps > 0

    def lines(self) -> list[str]:
        """Say it in words."""
        waits = [seconds for _, seconds in self.killed]
        after = (
            f", the next step after {statistics.median(waits):.1f} s (median), {max(waits):.1f} s (max)"
            if waits
            else ""
        )
        return [f"{self.steps} steps; {len(waits)} kills{after}", *self.tally.lines()]

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {**self.tally.as_dict(), "adds_up": self.tally.adds_up, "killed": self.killed, "steps": self.steps}


class _Roles:
    """The roles: starts, kills and restarts them, as processes or, on the memory transport, as tasks."""

    def __init__(self, config: DemoConfig, plane: Client, folder: Path, tasks: anyio.abc.TaskGroup) -> None:
        self._in_process = config.transport == "memory"
        self.move(plane, folder)
        self._tasks = tasks
        self._grace_s = 15.0 if config.transport == "ucxx" else 2.0
        self._lives: dict[str, int] = {}
        self._ends: dict[str, Callable[[], None]] = {}
        self._context = multiprocessing.get_context("spawn")

    def move(self, plane: Client, folder: Path) -> None:
        """Have the roles that are started from now on use another plane, and another folder."""
        self._plane = plane.attach_config()
        self._folder = folder

    def begin(self, role: str) -> None:
        """Start a role; it has a new name to the plane, which counts as alive until it is killed."""
        life = self._lives[role] = self._lives.get(role, -1) + 1
        part = Part(role, life, self._folder, WORKERS, self._plane, self._grace_s)
        (self._folder / f"{part.owner}.alive").touch()
        if self._in_process:
            scope = anyio.CancelScope()
            self._tasks.start_soon(self._play, part, scope)
            self._ends[role] = scope.cancel
            return
        process = self._context.Process(target=main, args=(part,), name=part.owner, daemon=True)
        process.start()

        def kill() -> None:
            process.kill()
            process.join()

        self._ends[role] = kill

    @staticmethod
    async def _play(part: Part, scope: anyio.CancelScope) -> None:
        with scope:
            await play(part)

    def kill(self, role: str) -> None:
        """End a role without a warning."""
        self._ends.pop(role)()
        (self._folder / f"{role}.{self._lives[role]}.alive").unlink()

    def end(self) -> None:
        """End all roles."""
        for role in list(self._ends):
            self.kill(role)


async def run(
    config: DemoConfig, kill: str | None, say: Callable[[str], None], checkpoint_s: float | None = None
) -> ControllerReport:
    """Run for ``config.seconds``, with kills, and make the account.

    Args:
        config: Transport, seconds and seed.
        kill: What is killed, again and again after recovery: one of KILLS of the transport, or ``"random"``; None:
            nothing.
        say: Told what happens, in lines.
        checkpoint_s: Seconds between two checkpoints; None: none are made, or as many as killing everything needs.

    Raises:
        ValueError: That cannot be killed on this transport.
        RuntimeError: Training did not begin, or not go on.
    """
    if kill is not None and kill not in (*KILLS[config.transport], "random"):
        raise ValueError(
            f"--kill {kill}: on {config.transport} it is one of {', '.join(KILLS[config.transport])}, random"
        )
    from asyncdp.examples.grpo_processes import ray_for_the_plane

    with (
        tempfile.TemporaryDirectory(prefix="asyncdp-controller-") as made,
        ray_for_the_plane() if config.transport == "transfer_queue" else nullcontext(),
    ):
        if kill == ALL and checkpoint_s is None:
            checkpoint_s = CHECKPOINT_S
        async with AsyncExitStack() as planes:
            return await _run(config, kill, say, planes, Path(made), checkpoint_s)


async def _run(
    config: DemoConfig,
    kill: str | None,
    say: Callable[[str], None],
    planes: AsyncExitStack,
    folder: Path,
    checkpoint_s: float | None,
) -> ControllerReport:
    rng, killed = random.Random(config.seed), list[tuple[str, float]]()
    possible = [one for one in KILLS[config.transport] if one != ALL]
    checkpoints, stage = Checkpoints(folder), _stage(folder, 0)
    plane = await planes.enter_async_context(start(config, "driver", None))
    await declare(plane)
    async with anyio.create_task_group() as tasks:
        roles = _Roles(config, plane, stage, tasks)
        try:
            for role in ROLES:
                roles.begin(role)
            await _next_step(Journal(stage), START_S, "the start")
            ends = time.monotonic() + config.seconds
            while time.monotonic() < ends:
                await _calm(plane, checkpoints, stage, checkpoint_s)
                if kill is None:
                    continue
                began = time.monotonic()
                if kill == ALL:
                    name = "everything"
                    roles.end()
                    destroy(plane)
                    await planes.aclose()
                    stage = _stage(folder, len(killed) + 1)
                    plane = await planes.enter_async_context(start(config, "driver", None))
                    count = await checkpoints.restore(plane, stage)
                    say(f"killed everything; the last checkpoint has {count} groups")
                    roles.move(plane, stage)
                    for role in ROLES:
                        roles.begin(role)
                else:
                    what = rng.choice(possible) if kill == "random" else kill
                    if what not in possible:
                        kill = None  # it does not come back
                        continue
                    if what == "storage":
                        possible.remove(what)
                    name = await _kill(what, roles, plane, rng)
                await _next_step(Journal(stage), RECOVERY_S, f"the death of {name}")
                killed.append((name, time.monotonic() - began))
                say(f"killed {name}; the next step came after {killed[-1][1]:.1f} s")
            roles.kill("controller")  # nothing new; what is under way is finished
            await anyio.sleep(DRAIN_S)
        finally:
            roles.end()
    left = {group.group_id for group in Listing(await _listed(plane)).groups if group.committed and group.is_complete}
    return ControllerReport(Tally.of(stage, left), killed, Journal(stage).read()[0])


def _stage(folder: Path, number: int) -> Path:
    """Return a new folder for journal and notes."""
    stage = folder / f"stage-{number}"
    stage.mkdir()
    return stage


async def _calm(plane: Client, checkpoints: Checkpoints, stage: Path, checkpoint_s: float | None) -> None:
    """Let the roles work for ``CALM_S``; make the checkpoints that are due in that time, at least one."""
    if checkpoint_s is None:
        await anyio.sleep(CALM_S)
        return
    left_s = CALM_S
    while left_s > 0:
        await checkpoints.save(plane, stage)
        await anyio.sleep(min(left_s, checkpoint_s))
        left_s -= checkpoint_s


async def _kill(what: str, roles: _Roles, plane: Client, rng: random.Random) -> str:
    """Kill a process or a slot host, start it again if that is possible, and return its name."""
    if what in ("controller", "worker", "scorer", "trainer"):
        role = rng.choice([role for role in ROLES if role.startswith(what)])
        roles.kill(role)
        await anyio.sleep(AWAY_S)
        roles.begin(role)
        return role
    if what == "storage":
        from asyncdp.examples.grpo_chaos import listens_at

        unit = plane.attach_config()["transfer_queue"]["endpoints"]["units"][0]
        os.kill(listens_at(set(unit["ports"].values())), signal.SIGKILL)
        return str(unit["id"])
    hosts = plane_of(plane)
    transport: Any = list(layers_of(plane))[-1]
    if hosts is None or (what == "host" and not hasattr(hosts, "pids")):
        host = rng.choice(sorted(transport.plane.hosts))
        transport.plane.hosts[host].crash()
        await anyio.sleep(AWAY_S)
        transport.plane.hosts[host].restart(adopt=True)
        return str(host)
    if what == "directory":
        hosts.server.kill()
        await anyio.sleep(AWAY_S)
        await hosts.server.start()
        return "directory"
    number = rng.choice(sorted(hosts.pids))
    os.kill(hosts.pids[number], signal.SIGKILL)
    await anyio.sleep(AWAY_S)
    await anyio.to_thread.run_sync(hosts.start_host, number)
    return f"slot host {number}"


async def _next_step(journal: Journal, within_s: float, after: str) -> None:
    """Wait for the next training step; raise RuntimeError if there is none in time."""
    version = journal.read()[0]
    with anyio.move_on_after(within_s):
        while journal.read()[0] == version:  # noqa: ASYNC110 - another process writes it
            await anyio.sleep(0.02)
        return
    raise RuntimeError(f"no training step within {within_s:g} s after {after}")


async def _listed(plane: Client) -> list[Any]:
    while True:
        with suppress(DataPlaneError):
            return await plane.list_metadata(PARTITION)
        await anyio.sleep(0.5)
