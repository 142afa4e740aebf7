"""Kills and pauses the servers of a real cluster while every verb is under way, and adds up what became of it.

    python -m tests.chaos transfer_queue

Prints, per fault: how long until it was noticed, how each verb ended, the largest gap of the event loop.
"""

# ruff: noqa: ARG005, T201 - one signature for all verbs; it prints its report
from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import psutil
import torch

from asyncdp import DataPlaneError, PartialReadError, stack
from asyncdp.transports.transfer_queue.endpoints import Endpoints, Server

if TYPE_CHECKING:
    from asyncdp.client import BaseClient
    from asyncdp.meta import KVBatchMeta

__all__ = ["Report", "chaos", "pid_of"]

ROWS = 64
TIMEOUT_S = 8.0
PAUSE_S = 3.0

Verb = Callable[["BaseClient", str], Awaitable[Any]]


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
        notice_s: From the fault to the first typed error of a call that is not retried; None: none needed to be seen.
        gap_s: Largest gap of the event loop meanwhile.
        slowest_s: The longest that a verb took.
        outcomes: How often each verb ended how.
        untyped: What left the client and was no DataPlaneError.
    """

    fault: str
    notice_s: float | None = None
    gap_s: float = 0.0
    slowest_s: float = 0.0
    outcomes: dict[str, str] = field(default_factory=dict)
    untyped: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Return it as one line."""
        tally = dict(Counter(self.outcomes.values()))
        notice = "-" if self.notice_s is None else f"{self.notice_s:.2f} s"
        took = f"slowest verb {self.slowest_s:.2f} s  gap {self.gap_s:.3f} s"
        return f"{self.fault:<18} noticed {notice:>7}  {took}  {tally}"


async def _put(client: BaseClient, step: str) -> KVBatchMeta:
    return await client.put_samples([f"{step}-new"], "p", {"x": torch.ones(1)}, timeout_s=TIMEOUT_S)


#: Every verb; each touches samples of its own, so that its outcome can be checked.
VERBS: dict[str, Verb] = {
    "ping": lambda c, s: c.ping(timeout_s=TIMEOUT_S),
    "register_partition": lambda c, s: c.register_partition("p", ["x"], 1, ["train"], timeout_s=TIMEOUT_S),
    "claim_meta": lambda c, s: c.claim_meta("p", "train", ["x"], 4, timeout_s=TIMEOUT_S, min_batch_size=1),
    "get_samples": lambda c, s: c.get_samples([f"k{at}" for at in range(ROWS)], "p", ["x"], timeout_s=TIMEOUT_S),
    "put_samples": _put,
    "replace": lambda c, s: c.put_samples(["r0", "r1"], "p", {"x": torch.zeros(2)}, timeout_s=TIMEOUT_S),
    "tags": lambda c, s: c.put_samples(["r0"], "p", tags=[{s: 1}], timeout_s=TIMEOUT_S),
    "clear_samples": lambda c, s: c.clear_samples([f"{s}-clear"], "p", timeout_s=TIMEOUT_S),
    "pop": lambda c, s: c.pop([f"{s}-pop"], "p", timeout_s=TIMEOUT_S),
    "evict": lambda c, s: c.evict([f"{s}-evict"], "p", timeout_s=TIMEOUT_S),
    "list_metadata": lambda c, s: c.list_metadata("p", timeout_s=TIMEOUT_S),
    "depth": lambda c, s: c.depth("p", timeout_s=TIMEOUT_S),
    "list_claims": lambda c, s: c.list_claims("p", "train", timeout_s=TIMEOUT_S),
    "release_claims": lambda c, s: c.release_claims("p", "nobody", timeout_s=TIMEOUT_S),
    "check_consumption_status": lambda c, s: c.check_consumption_status("p", ["train"], timeout_s=TIMEOUT_S),
    "list_partitions": lambda c, s: c.list_partitions(timeout_s=TIMEOUT_S),
    "describe": lambda c, s: c.describe("p", timeout_s=TIMEOUT_S),
    "wait_partition": lambda c, s: c.wait_partition("p", timeout_s=TIMEOUT_S),
    "drop_partition": lambda c, s: c.drop_partition("other", timeout_s=TIMEOUT_S),
}


@contextmanager
def _gaps(report: Report) -> Iterator[None]:
    """Measure the largest time between two ticks of the loop, 5 ms of sleep taken off."""
    loop = asyncio.get_running_loop()
    last = time.perf_counter()
    handle: Any = None

    def tick() -> None:
        nonlocal last, handle
        now = time.perf_counter()
        report.gap_s = max(report.gap_s, now - last - 0.005)
        last = now
        handle = loop.call_later(0.005, tick)

    handle = loop.call_later(0.005, tick)
    yield
    handle.cancel()


async def _all_verbs(client: BaseClient, step: str, report: Report) -> None:
    async def one(name: str) -> None:
        began = time.monotonic()
        try:
            await VERBS[name](client, step)
            report.outcomes[name] = "ok"
        except DataPlaneError as err:
            report.outcomes[name] = type(err).__name__
        except Exception as err:  # noqa: BLE001 - what this is looking for
            report.outcomes[name] = type(err).__name__
            report.untyped.append(f"{name}: {err!r}")
        report.slowest_s = max(report.slowest_s, time.monotonic() - began)

    async with anyio.create_task_group() as group:
        for name in VERBS:
            group.start_soon(one, name)


async def _notice(ask: Callable[[], Awaitable[Any]], until: float) -> float | None:
    """Return when a call that is not retried first failed, by the monotonic clock."""
    while time.monotonic() < until:
        try:
            await ask()
        except DataPlaneError:
            return time.monotonic()
        await anyio.lowlevel.checkpoint()
    return None


async def strike(
    fault: str, act: Callable[[], None], undo: Callable[[], None] | None, client: BaseClient, once: BaseClient
) -> Report:
    """Do one fault with every verb under way."""
    report = Report(fault)
    step = fault.replace(" ", "-")
    extra = [f"{step}-{what}" for what in ("clear", "pop", "evict")]
    await client.put_samples(extra, "p", {"x": torch.zeros(3)})
    await client.register_partition("other", [], 1, [])
    kept = [f"k{at}" for at in range(ROWS)]
    with _gaps(report):
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
            if fault.endswith("unit"):
                ask = lambda: once.get_samples(kept, "p", ["x"], timeout_s=TIMEOUT_S)  # noqa: E731
            else:
                ask = lambda: once.ping(timeout_s=TIMEOUT_S)  # noqa: E731
            seen = await _notice(ask, time.monotonic() + PAUSE_S)
            report.notice_s = None if seen is None else seen - struck

        async def verbs() -> None:
            await anyio.sleep(0.1)
            await _all_verbs(client, step, report)

        async with anyio.create_task_group() as group:
            for task in (hit, notice, verbs):
                group.start_soon(task)
    return report


async def idle(report: Report) -> Report:
    """Do nothing for a second, for comparison."""
    with _gaps(report):
        await anyio.sleep(1.0)
    return report


async def settled(client: BaseClient) -> None:
    """Wait until the plane answers again."""
    with anyio.fail_after(20):
        while True:
            try:
                await client.ping()
            except DataPlaneError:
                await anyio.sleep(0.1)
            else:
                return


async def check_kept(client: BaseClient) -> tuple[int, int]:
    """Read what was acknowledged at the beginning; return (rows that came, rows named as lost). None may be wrong."""
    ids = came = [f"k{at}" for at in range(ROWS)]
    lost: list[str] = []
    try:
        rows = await client.get_samples(ids, "p", ["x"], timeout_s=TIMEOUT_S)
    except PartialReadError as err:
        rows, came, lost = err.rows, err.ok.sample_ids, err.failed.sample_ids
    assert rows["x"].tolist() == [int(i[1:]) for i in came], "a row came with another one's value"
    assert sorted(came + lost) == sorted(ids)
    return len(came), len(lost)


async def fill(client: BaseClient) -> None:
    """Put what is checked after each fault."""
    await client.register_partition("p", ["x"], ROWS, ["train"])
    await client.put_samples([f"k{at}" for at in range(ROWS)], "p", {"x": torch.arange(float(ROWS))})
    await client.put_samples(["r0", "r1"], "p", {"x": torch.zeros(2)})


async def chaos(transport: Any, again: Callable[[], Any], faults: tuple[str, ...]) -> list[Report]:
    """Run the faults on the plane that ``transport`` owns; ``again`` bootstraps another after a controller's death."""
    from asyncdp.transports.transfer_queue import TQTransport

    endpoints = Endpoints.from_config(transport.attach_config()["transfer_queue"]["endpoints"])
    attach = lambda: TQTransport(transport.attach_config(), bootstrap=False)  # noqa: E731
    owner, client, once = stack(transport), stack(attach()), stack(attach(), max_attempts=1, max_rounds=1)
    await fill(client)
    await once.ping()
    pids = {server.id: pid_of(server) for server in (endpoints.controller, *endpoints.units)}
    controller, unit = endpoints.controller.id, endpoints.units[0].id
    reports = [await idle(Report("idle"))]

    def send(who: str, number: int) -> Callable[[], None]:
        return lambda: os.kill(pids[who], number)

    for fault in faults:
        kind, what = fault.split()
        who = controller if what == "controller" else unit
        if kind == "pause":
            report = await strike(fault, send(who, signal.SIGSTOP), send(who, signal.SIGCONT), client, once)
        else:
            report = await strike(fault, send(who, signal.SIGKILL), None, client, once)
        reports.append(report)
        if fault == "kill controller":
            await owner.close()
            reports.append(await _next_life(client, again))
            continue
        await settled(client)
        came, lost = await check_kept(client)
        report.outcomes["afterwards"] = f"{came} rows came, {lost} lost"
        assert lost == 0 or fault == "kill unit"
        if fault == "kill unit":
            listed = {key for group in await client.list_metadata("p") for key in group.lost_keys}
            assert len(listed) >= lost
    for one in (client, once):
        await one.close()
    if not owner._closed:
        await owner.close()
    return reports


async def _next_life(client: BaseClient, again: Callable[[], Any]) -> Report:
    """Bootstrap anew: the old client finds it, its rows are reported lost, none is wrong, and it goes on."""
    report = Report("next life")
    reborn = stack(await anyio.to_thread.run_sync(again))
    began = time.monotonic()
    with _gaps(report):
        await settled(client)
        report.notice_s = time.monotonic() - began
        for call in (client.depth("p"), client.get_samples(["k0"], "p", ["x"])):
            try:
                await call
            except DataPlaneError as err:
                report.outcomes["old partition"] = type(err).__name__
        await client.register_partition("p", ["x"], 1, ["train"])
        await client.put_samples(["n"], "p", {"x": torch.tensor([7.0])})
        assert (await client.get_samples(["n"], "p", ["x"]))["x"].tolist() == [7.0]
        report.outcomes["goes on"] = "ok"
    await reborn.close()
    return report


#: All faults, in an order in which each finds what it needs.
FAULTS = ("pause controller", "pause unit", "kill unit", "kill controller")


def on_ray(faults: tuple[str, ...] = FAULTS) -> list[Report]:
    """Run faults on a Ray cluster of their own; each controller that dies costs a bootstrap, some 20 s."""
    from asyncdp.transports.transfer_queue import TQTransport
    from tests.transfer_queue.ray_cluster import base_config, start_ray

    ray = start_ray()
    try:
        transport = TQTransport(base_config(transfer_queue={"split_bytes": 1}))
        return asyncio.run(chaos(transport, lambda: TQTransport(base_config()), faults))
    finally:
        ray.shutdown()


def main(argv: list[str]) -> int:
    """Run the named faults, by default all of them, and print the report."""
    unknown = [name for name in argv if name not in FAULTS]
    if unknown:
        print(f"no fault {unknown[0]!r}; there are {', '.join(map(repr, FAULTS))}")
        return 2
    reports = on_ray(tuple(argv) or FAULTS)
    for report in reports:
        print(report.line())
    for report in reports:
        print(report.fault, json.dumps(report.outcomes))
    untyped = [what for report in reports for what in report.untyped]
    print(*(f"UNTYPED {what}" for what in untyped), sep="\n")
    return int(bool(untyped))
