"""Kills and pauses the servers of a real cluster while every verb is under way, and adds up what became of it.

    python -m tests.chaos transfer_queue ["kill unit" ...]

Prints, per fault: how long until it was noticed, how each verb ended, the largest gap of the event loop, and that of an
idle loop in another process at the same time.
"""

# ruff: noqa: T201 - it prints its report
from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import psutil
import torch

from asyncdp import DataPlaneError, stack
from asyncdp.transports.transfer_queue.endpoints import Endpoints, Server
from tests.chaos.transfer_queue_idle import IdleLoop, Ticks
from tests.chaos.transfer_queue_verbs import KEPT, TIMEOUT_S, Round, check_kept, fill

if TYPE_CHECKING:
    from asyncdp.client import Client

__all__ = ["FAULTS", "TIMEOUT_S", "Chaos", "Report", "chaos", "main", "on_ray", "pid_of", "told"]

PAUSE_S = 3.0
#: All faults, in an order in which each finds what it needs.
FAULTS = ("pause controller", "pause unit", "kill unit", "kill controller")


def pid_of(server: Server) -> int:
    """Return the process that listens at a server's port."""
    port = next(iter(server.ports.values()))
    for one in psutil.net_connections(kind="tcp"):
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid:
            return int(one.pid)
    msg = f"nobody listens at {port}"
    raise LookupError(msg)


@dataclass
class Report:
    """What one fault did.

    Attributes:
        fault: Its name.
        notice_s: From the fault to the first typed error of a call that is not retried; None: nothing was to be seen.
        gap_s, idle_gap_s: Largest gap of the event loop meanwhile, and of an idle one.
        slowest_s: The longest that a verb took.
        outcomes: How each verb ended, and what was found afterwards.
        wrong: What must not be: untyped errors, acknowledged work that does not hold.
    """

    fault: str
    notice_s: float | None = None
    gap_s: float = 0.0
    idle_gap_s: float = 0.0
    slowest_s: float = 0.0
    outcomes: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Return it as one line."""
        tally = dict(Counter(self.outcomes.values()))
        notice = "-" if self.notice_s is None else f"{self.notice_s:.2f} s"
        gaps = f"gap {self.gap_s * 1e3:.0f} ms, idle {self.idle_gap_s * 1e3:.0f} ms"
        return f"{self.fault:<18} noticed {notice:>7}  slowest verb {self.slowest_s:.2f} s  {gaps}  {tally}"


async def _notice(ask: Callable[[], Awaitable[Any]], until: float) -> float | None:
    """Return when a call that is not retried first failed, by the monotonic clock."""
    while time.monotonic() < until:
        try:
            await ask()
        except DataPlaneError:
            return time.monotonic()
        await anyio.lowlevel.checkpoint()
    return None


class Chaos:
    """One run: the clients, and what watches them.

    Args:
        attach: Makes a bare transport on the plane.
        idle: The loop to compare with.
    """

    def __init__(self, attach: Callable[[], Any], idle: IdleLoop) -> None:
        """Attach a client with the default layers, and one that does not ask again."""
        self.client: Client = stack(attach())
        self.once: Client = stack(attach(), max_attempts=1, max_rounds=1)
        self.idle = idle
        self.rounds: list[Round] = []

    async def strike(
        self,
        fault: str,
        act: Callable[[], None],
        undo: Callable[[], None] | None,
        before: Callable[[], Awaitable[None]] | None = None,
    ) -> Report:
        """Do one fault with every verb under way; ``before`` prepares it."""
        report = Report(fault)
        this = Round(len(self.rounds) + 1)
        self.rounds.append(this)
        await this.prepare(self.client)
        if before is not None:
            await before()
        struck = 0.0

        async def hit() -> None:
            nonlocal struck
            await anyio.sleep(0.1)
            struck = time.monotonic()
            act()
            if undo is not None:
                await anyio.sleep(PAUSE_S)
                undo()

        async def notice() -> None:
            def ask() -> Awaitable[Any]:
                if fault.endswith("unit"):
                    return self.once.get_samples(KEPT, "p", ["x"], timeout_s=TIMEOUT_S)
                if fault.endswith("master"):
                    return self.once.put_samples(["probe"], "p", {"x": torch.zeros(1)}, timeout_s=TIMEOUT_S)
                return self.once.ping(timeout_s=TIMEOUT_S)

            seen = await _notice(ask, time.monotonic() + PAUSE_S)
            report.notice_s = None if seen is None else seen - struck

        async def verbs() -> None:
            await anyio.sleep(0.1)
            await this.run(self.client)

        self.idle.begin()
        ticks = Ticks(asyncio.get_running_loop())
        async with anyio.create_task_group() as group:
            for task in (hit, notice, verbs):
                group.start_soon(task)
        report.gap_s = ticks.stop()
        report.idle_gap_s = self.idle.gap_s()
        report.slowest_s, report.outcomes = this.slowest_s, dict(this.outcomes)
        report.wrong += this.untyped
        return report

    async def rest(self) -> Report:
        """Do nothing for a second, for comparison."""
        report = Report("none")
        self.idle.begin()
        ticks = Ticks(asyncio.get_running_loop())
        await anyio.sleep(1.0)
        report.gap_s, report.idle_gap_s = ticks.stop(), self.idle.gap_s()
        return report

    async def until_well(self) -> None:
        """Wait until the plane answers again."""
        with anyio.fail_after(60):
            while True:
                try:
                    await self.client.ping()
                except DataPlaneError:
                    await anyio.sleep(0.1)
                else:
                    return

    async def account(self, report: Report) -> None:
        """See whether all that was acknowledged so far holds, but for rows of a unit that is dead, which are named."""
        await self.until_well()
        came, lost = await check_kept(self.client)
        named = {key for group in await self.client.list_metadata("p") for key in group.lost_keys}
        report.outcomes["afterwards"] = f"{came} rows came, {len(lost)} lost"
        if lost and report.fault != "kill unit":
            report.wrong.append(f"rows lost though no unit died: {sorted(lost)}")
        if not lost <= named:
            report.wrong.append(f"lost, and not listed in lost_keys: {sorted(lost - named)}")
        this = self.rounds[-1]
        await this.check(self.client, named)
        report.wrong += this.wrong

    async def next_life(self, again: Callable[[], Any]) -> Report:
        """Bootstrap anew: the old client finds it, its rows are reported lost, none is wrong, and it goes on."""
        report = Report("next life")
        reborn = stack(await anyio.to_thread.run_sync(again))
        began = time.monotonic()
        self.idle.begin()
        ticks = Ticks(asyncio.get_running_loop())
        await self.until_well()
        report.notice_s = time.monotonic() - began
        for name, call in (
            ("old depth", self.client.depth("p")),
            ("old rows", self.client.get_samples(KEPT, "p", ["x"])),
            ("old claim", self.client.get_data(self.rounds[-1].held)),
        ):
            try:
                report.wrong.append(f"{name}: {await call}")
            except DataPlaneError as err:
                report.outcomes[name] = type(err).__name__
        await self.client.register_partition("p", ["x"], 1, ["train", "held"])
        await self.client.put_samples(["n"], "p", {"x": torch.tensor([7.0])})
        if (await self.client.get_samples(["n"], "p", ["x"]))["x"].tolist() != [7.0]:
            report.wrong.append("the next life does not give back what was put")
        try:
            report.wrong.append(f"a row of the last life: {await self.client.get_samples(KEPT[:1], 'p', ['x'])}")
        except DataPlaneError as err:
            report.outcomes["old row, registered anew"] = type(err).__name__
        report.outcomes["goes on"] = "ok"
        report.gap_s, report.idle_gap_s = ticks.stop(), self.idle.gap_s()
        await reborn.close()
        return report

    async def close(self) -> None:
        """Close both clients."""
        await self.client.close()
        await self.once.close()


async def chaos(transport: Any, again: Callable[[], Any], faults: tuple[str, ...], idle: IdleLoop) -> list[Report]:
    """Run the faults on the plane that ``transport`` owns; ``again`` bootstraps another after a controller's death."""
    from asyncdp.transports.transfer_queue import TQTransport

    endpoints = Endpoints.from_config(transport.attach_config()["transfer_queue"]["endpoints"])
    run = Chaos(lambda: TQTransport(transport.attach_config(), bootstrap=False), idle)
    owner = stack(transport)
    await fill(run.client)
    await run.once.ping()
    pids = {server.id: pid_of(server) for server in (endpoints.controller, *endpoints.units)}
    reports = [await run.rest()]

    def send(who: str, number: int) -> Callable[[], None]:
        return lambda: os.kill(pids[who], number)

    for fault in faults:
        kind, what = fault.split()
        who = (endpoints.controller if what == "controller" else endpoints.units[0]).id
        if kind == "pause":
            report = await run.strike(fault, send(who, signal.SIGSTOP), send(who, signal.SIGCONT))
        else:
            report = await run.strike(fault, send(who, signal.SIGKILL), None)
        reports.append(report)
        if fault == "kill controller":
            await owner.close()
            reports.append(await run.next_life(again))
            break
        await run.account(report)
    await run.close()
    await owner.close()
    return reports


def on_ray(faults: tuple[str, ...] = FAULTS) -> list[Report]:
    """Run faults on a Ray cluster of their own; a controller that dies costs a bootstrap, some 20 s."""
    from asyncdp.transports.transfer_queue import TQTransport
    from tests.transfer_queue.ray_cluster import base_config, start_ray

    idle = IdleLoop()
    ray = start_ray()
    try:
        transport = TQTransport(base_config(transfer_queue={"split_bytes": 1}))
        return asyncio.run(chaos(transport, lambda: TQTransport(base_config()), faults, idle))
    finally:
        ray.shutdown()
        idle.close()


def main(argv: list[str]) -> int:
    """Run the named faults, by default all of them, and print the report."""
    unknown = [name for name in argv if name not in FAULTS]
    if unknown:
        print(f"no fault {unknown[0]!r}; there are {', '.join(map(repr, FAULTS))}")
        return 2
    return told(on_ray(tuple(argv) or FAULTS))


def told(reports: list[Report]) -> int:
    """Print reports; return 1 if anything is wrong, else 0."""
    for report in reports:
        print(report.line())
    for report in reports:
        print(report.fault, json.dumps(report.outcomes))
    wrong = [f"WRONG {report.fault}: {what}" for report in reports for what in report.wrong]
    print("\n".join(wrong) or "nothing wrong")
    return int(bool(wrong))
