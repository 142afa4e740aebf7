"""Chaos on a UCXX plane of real processes: each is killed and paused while every verb is under way.

    python -m tests.chaos ucxx [--way lane|wire|all] [--faults "kill host,mute port"]

Runs all faults over the shared-memory lane, then over UCX in a network namespace with loopback only (a UCX listener
binds to every address), then 50 shutdowns with reads in flight over both. Prints a table per way; the exit code is not
0 if an answer was wrong, an error was no DataPlaneError, a call took longer than its timeout, a row is unaccounted for,
or anything is left.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from asyncdp.errors import DataPlaneError
from tests.chaos.ucxx_account import balance
from tests.chaos.ucxx_faults import FAULTS, Fault, strike
from tests.chaos.ucxx_plane import GRACE_S, ChaosPlane, descriptors, open_files
from tests.chaos.ucxx_report import show
from tests.chaos.ucxx_tally import Tally
from tests.chaos.ucxx_verbs import TIMEOUT_S
from tests.chaos.ucxx_world import World

__all__ = ["chaos", "check", "main"]

ROOT = Path(__file__).parents[2]
#: What a call may take beyond its timeout: a tick of the loop, on a machine that is shared.
BOUND_S = 1.0
#: A loop that stands still this much longer than an idle one waited for something in a blocking way: a paused process
#: is paused for 3 s, a call may take 4.
BLOCKED_S = 1.5
DRAIN_S = 60.0


async def _idle(world: World) -> Tally:
    """Every verb, and no fault: what to compare with. The first tally is of a loop that does nothing."""
    quiet = Tally("idle loop")
    with quiet.ticking():
        await asyncio.sleep(1.0)
    tally = world.begin("no fault")
    over = asyncio.Event()
    with tally.ticking():
        async with asyncio.TaskGroup() as group:
            group.create_task(world.verbs.until(over))
            await asyncio.sleep(1.5)
            over.set()
    return quiet


async def _drain(world: World) -> None:
    """Let the trainers finish, remove everything, and wait until every slot is free."""
    plane = world.plane
    assert await plane.roles["worker"].end() == 0
    async with asyncio.timeout(DRAIN_S):
        while True:
            try:
                if not await world.client.list_metadata("rollouts", timeout_s=TIMEOUT_S):
                    break
            except DataPlaneError:
                pass
            await asyncio.sleep(0.1)
    assert await plane.roles["trainer"].end() == 0
    tally = world.begin("afterwards")
    await world.verbs.still_gone()
    for name in ("p", "c", "rollouts", "o"):
        await world.client.drop_partition(name, timeout_s=TIMEOUT_S)
    hosts = [number for number, child in plane.hosts.items() if child.process.poll() is None]
    async with asyncio.timeout(TIMEOUT_S + 4 * GRACE_S + 5.0):
        while any(used := [plane.used_slots(number) for number in hosts]):
            tally.afterwards = f"slots in use: {used}"
            await asyncio.sleep(0.2)
    tally.afterwards = "every slot is free"


async def chaos(way: str, faults: Sequence[Fault], folder: Path) -> tuple[list[Tally], dict[str, int]]:
    """Run faults on a plane of their own; returns what each did, and the account."""
    mine = descriptors(os.getpid())
    plane = ChaosPlane(folder, lane="auto" if way == "lane" else "off", ucx=way == "wire")
    tallies: list[Tally] = []
    try:
        await plane.start()
        async with World.of(plane) as world:
            await plane.start_role("worker")
            await plane.start_role("trainer")
            tallies += [await _idle(world), world.tally]
            opened = descriptors(plane.hosts[0].process.pid)
            for fault in faults:
                await strike(world, fault)
                tallies.append(world.tally)
            await _drain(world)
            tallies.append(world.tally)
            if plane.hosts[0].process.poll() is None and not any(fault.needs_ucx for fault in faults):
                more = descriptors(plane.hosts[0].process.pid) - opened
                assert more <= 16, f"{more} descriptors more in the slot host"  # connections of roles come and go
        codes = await plane.close()
        assert not any(codes.values()), f"exit codes {codes}"
        lossy = any(fault.name in ("renew host", "lose host") for fault in faults)
        plane.discard()
        account = balance(plane.journals(), world.released, world.lost.get("rollouts", ()), lossy=lossy)
    finally:
        await plane.abandon()
    left = plane.segments()
    assert not left, f"segments are left: {left}"
    more = descriptors(os.getpid()) - mine
    # UCX keeps the worker of a client that gave up transfers to a paused host, 12 descriptors, until the process ends.
    assert more <= (4 if way == "lane" else 16), f"{more} descriptors more in this process: {open_files(os.getpid())}"
    return tallies, account


def check(tallies: Sequence[Tally]) -> list[str]:
    """Return what was wrong."""
    idle = tallies[0].gap_s
    problems = [f"{tally.fault}: {wrong}" for tally in tallies for wrong in tally.wrong]
    for tally in tallies:
        verb, longest = tally.longest
        if longest > TIMEOUT_S + BOUND_S:
            problems.append(f"{tally.fault}: {verb} took {longest:.2f} s with a timeout of {TIMEOUT_S} s")
        if tally.gap_s > idle + BLOCKED_S:
            problems.append(f"{tally.fault}: the event loop stood still for {tally.gap_s:.2f} s")
    return problems


def run(way: str, names: Collection[str] | None = None) -> list[str]:
    """Run faults (all, or those named) over ``lane`` or ``wire``, print the table, return what was wrong."""
    faults = [
        fault for fault in FAULTS if (way == "wire" or not fault.needs_ucx) and (names is None or fault.name in names)
    ]
    with tempfile.TemporaryDirectory(prefix="asyncdp-chaos-") as folder:
        tallies, account = asyncio.run(chaos(way, faults, Path(folder)))
    show(f"UCXX over the {'shared-memory lane' if way == 'lane' else 'wire'}", tallies, account)
    return check(tallies)


def _in_namespace(argv: Sequence[str]) -> int:
    """Run this module where there is only loopback."""
    inside = [sys.executable, "-m", "tests.chaos.ucxx", "--inside", *argv]
    command = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *inside]
    env: dict[str, Any] = {**os.environ, "UCX_TLS": "tcp,self", "UCX_WARN_UNUSED_ENV_VARS": "n"}
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


def ends(way: str) -> int:
    """Run 50 ends of clients and of hosts with reads in flight; returns an exit code."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-o",
        "faulthandler_timeout=0",
        "tests/ucxx/test_shutdowns.py",
        "-k",
        way,
    ]
    env = {**os.environ, "ASYNCDP_SHUTDOWNS": "50", **({"ASYNCDP_NETNS": "1"} if way == "wire" else {})}
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


def main(argv: list[str]) -> int:
    """Run it; returns an exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos ucxx", description=__doc__.splitlines()[0])
    parser.add_argument("--way", choices=["lane", "wire", "all"], default="all")
    parser.add_argument("--faults", help="names of faults, with commas between; all if not given")
    parser.add_argument("--inside", action="store_true", help="this process is in a namespace of its own")
    args = parser.parse_args(argv)
    names = None if args.faults is None else [name.strip() for name in args.faults.split(",")]
    unknown = set(names or ()) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"no such fault: {sorted(unknown)}; there are {[fault.name for fault in FAULTS]}")
    code = 0
    if args.way == "all" or (args.way == "wire" and not args.inside):
        chosen = [] if args.faults is None else ["--faults", args.faults]
        code = _in_namespace(["--way", "wire", *chosen])
    if args.way in ("lane", "all") or args.inside:
        way = "wire" if args.inside else "lane"
        problems = run(way, names)
        print("\n".join(problems), flush=True)  # noqa: T201 - a report
        code = code or int(bool(problems))
        if names is None:
            code = code or ends(way)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
