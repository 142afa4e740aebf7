"""Writers and readers in processes of their own, random cancels, a small arena: every byte right, nothing lost.

    python -m tests.chaos.ucxx_stress [--seconds 60] [--seed 1] [--wire lane|ucx|both]

Over ``ucx`` it runs in a network namespace of its own, since UCX listeners bind to every address.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncdp.client import Client
from asyncdp.process.buffer_pool import BufferPool
from asyncdp.rows.block import PICKLE
from asyncdp.transports.ucxx import UCXXTransport
from asyncdp.transports.ucxx.client.connection_pool import Pool
from asyncdp.transports.ucxx.directory import EmbeddedServer
from asyncdp.transports.ucxx.host.settings import HostSettings
from asyncdp.transports.ucxx.wire.handshake import Secret
from tests.chaos.ucxx_stress_account import account
from tests.chaos.ucxx_stress_gauge import Gauge
from tests.chaos.ucxx_stress_roles import FLOORS, GROUPS, STORE, TRAIN, play
from tests.chaos.ucxx_stress_rows import FIELDS

ROOT = Path(__file__).parents[2]
SECRET = "a secret for stress"
WRITERS = READERS = 4
HOSTS = 2
#: Small: writers fill it faster than readers empty it.
ARENA_BYTES = 12 << 20
GRACE_S = 3.0
FREE_S = 60.0

Cast = dict[str, tuple[ForkProcess, Connection]]


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)  # noqa: T201 - a command line


def cast() -> Cast:
    """Fork the roles while this process has neither threads nor UCX; they wait for what to know."""
    context = multiprocessing.get_context("fork")
    made: Cast = {}
    for kind, count in (("writer", WRITERS), ("reader", READERS)):
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=play, args=(kind, number, theirs), daemon=True)
            process.start()
            theirs.close()
            made[f"{kind}{number}"] = process, ours
    return made


class Stress:
    """One run.

    Args:
        wire: ``lane`` or ``ucx``.
        seed: Of everything that is drawn; how the processes interleave stays chance.
        folder: For the directory, the journals and the floors.
    """

    def __init__(self, wire: str, seed: int, folder: Path) -> None:
        self.wire, self.seed, self.folder = wire, seed, folder
        self.plane = f"stress{uuid.uuid4().hex[:8]}"
        self.server = EmbeddedServer(folder / "directory", fsync="no")
        self.hosts: list[subprocess.Popen[str]] = []
        self.told: list[dict[str, Any]] = []
        self.gauges: list[Gauge] = []
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()

    @property
    def config(self) -> dict[str, Any]:
        """A client's config."""
        return {
            "enabled": True, "impl": "ucxx", "backend": "valkey", "storage_capacity": 1 << 20, "num_storage_units": 2,
            "claim_meta_poll_interval_s": 0.05, "controller_address": self.server.url,
            "ucxx": {"namespace": self.plane, "lane": "auto" if self.wire == "lane" else "off", "devices": "lo"},
        }  # fmt: skip

    def start_host(self, number: int) -> None:
        """Start a slot host; one of them has a slot per row."""
        keys = {
            "host_id": f"host-{number}", "plane": self.plane, "ports": 2, "arena_bytes": ARENA_BYTES, "devices": "lo",
            "max_slot_bytes": 2 << 20, "rows_per_slot": 1 if number == 0 else None, "grace_s": GRACE_S,
            "keep_arena": False, "ucx": self.wire == "ucx", "inline_bytes": 0 if self.wire == "ucx" else 32 << 10,
        }  # fmt: skip
        settings = msgspec.json.encode(msgspec.convert(keys, HostSettings)).decode()
        command = [sys.executable, "-m", "asyncdp.transports.ucxx.host.main", "--watch-stdin", "--settings", settings]
        env = {**os.environ, "ASYNCDP_SECRET": SECRET, "ASYNCDP_DIRECTORY": self.server.url}
        pipe = subprocess.PIPE
        command += ["--namespace", self.plane]
        self.hosts.append(subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, env=env))

    async def start(self, roles: Cast) -> None:
        """Start the plane and tell the roles about it."""
        await self.server.start()
        for number in range(HOSTS):
            self.start_host(number)
        for host in self.hosts:
            assert host.stdout is not None
            line = await asyncio.to_thread(host.stdout.readline)
            self.told.append(json.loads(line))
        np.memmap(self.folder / FLOORS, np.int64, "w+", shape=(WRITERS, GROUPS)).flush()
        async with self.client() as client:
            await client.register_partition(TRAIN, FIELDS, 1000, ["train"])
            await client.register_partition(STORE, FIELDS, 1000, ["nobody"])
        told = {"config": self.config, "folder": str(self.folder), "seed": self.seed, "writers": WRITERS}
        for _, order in roles.values():
            order.send({**told, "cut_chance": 0.15})
        pids = {name: process.pid for name, (process, _) in roles.items()}
        pids |= {f"slot host {number}": host.pid for number, host in enumerate(self.hosts)}
        self.gauges = [Gauge(name, pid) for name, pid in pids.items() if pid]
        if self.server.pid:
            self.gauges.append(Gauge("directory", self.server.pid, bounded=False))

    def client(self) -> Client:
        """A client of the run itself."""
        return Client(UCXXTransport(self.config, bootstrap=False))

    async def work(self, roles: Cast, seconds: float) -> None:
        """Let them work, and look at them."""
        began, shown = time.monotonic(), 0.0
        while time.monotonic() - began < seconds and not self.problems:
            await asyncio.sleep(1.0)
            self.look_at(roles)
            if time.monotonic() - shown > 5:
                shown = time.monotonic()
                async with self.client() as client:
                    depth = await client.depth(TRAIN)
                free = [(await self.facts(told))["free_bytes"] for told in self.told]
                say(f"  {time.monotonic() - began:5.1f} s: {depth} rows to train on, {free} bytes free")

    def look_at(self, roles: Cast) -> None:
        """Take samples; note who ended before its time."""
        for gauge in self.gauges:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                gauge.sample()
        for name, (process, order) in roles.items():
            if not process.is_alive():
                told = order.recv() if order.poll() else f"exit code {process.exitcode}"
                self.problems.append(f"{name} ended early: {told}")

    async def stop(self, roles: Cast, kind: str) -> None:
        """Tell roles to finish, and take what they say."""
        mine = {name: pair for name, pair in roles.items() if name.startswith(kind)}
        for process, order in mine.values():
            if process.is_alive():
                order.send("stop")
        for name, (process, order) in mine.items():
            try:
                told = await asyncio.to_thread(lambda o=order: o.recv() if o.poll(90) else "no answer in 90 s")
            except EOFError:
                told = "no answer"
            if isinstance(told, dict):
                self.counts.update(told)
            else:
                self.problems.append(f"{name}: {told}")
            await asyncio.to_thread(process.join, 30)
            if process.exitcode != 0:
                self.problems.append(f"{name} ended with {process.exitcode}")

    async def facts(self, told: dict[str, Any]) -> Any:
        """What a host has."""
        pool = Pool(None, Secret(SECRET), PICKLE, BufferPool())
        try:
            async with pool.use(told["address"], told["ports"][0]) as connection:
                return await connection.ask()
        finally:
            pool.close()

    async def all_free(self) -> None:
        """Wait until every slot is FREE."""
        async with self.client() as client:
            if left := [key for group in await client.list_metadata(TRAIN) for key in group.keys]:
                claims = await client.list_claims(TRAIN)
                self.problems.append(f"{len(left)} rows are left: {left[:5]}; claims: {claims}")
        until = time.monotonic() + FREE_S
        for number, told in enumerate(self.told):
            while True:
                facts = await self.facts(told)
                used = {state: facts[state] for state in ("ready", "writing", "given_up", "reading") if facts[state]}
                if not used and facts["free_bytes"] == ARENA_BYTES:
                    break
                if time.monotonic() > until:
                    self.problems.append(f"slots of host {number} are not free: {used}")
                    break
                await asyncio.sleep(0.2)

    async def end(self) -> None:
        """End the plane."""
        for number, host in enumerate(self.hosts):
            assert host.stdin is not None
            assert host.stdout is not None
            host.stdin.close()
            if code := await asyncio.to_thread(host.wait, 30):
                self.problems.append(f"slot host {number} ended with {code}")
            host.stdout.close()
        await self.server.stop()

    async def run(self, roles: Cast, seconds: float) -> None:
        """All of it."""
        try:
            await self.start(roles)
            await self.work(roles, seconds)
            for kind in ("writer", "reader"):
                await self.stop(roles, kind)
            await self.all_free()
        finally:
            for process, _ in roles.values():
                process.kill()
            await self.end()
        self.problems += [gauge.problem for gauge in self.gauges if gauge.problem]


def stress(wire: str, seconds: float, seed: int) -> bool:
    """Run once, print what came of it; whether all of it was right."""
    say(f"== stress over {wire}: {WRITERS} writers, {READERS} readers, {seconds:g} s, seed {seed}")
    folder = Path(tempfile.mkdtemp(prefix="asyncdp-stress-"))
    try:
        roles = cast()
        run = Stress(wire, seed, folder)
        asyncio.run(run.run(roles, seconds))
        counts, wrong = account(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    run.problems += wrong
    if left := [told["arena"] for told in run.told if Path("/dev/shm", told["arena"]).exists()]:
        run.problems.append(f"left in /dev/shm: {left}")
    for name, count in sorted({**run.counts, **counts}.items()):
        say(f"  {name:38s} {count:8d}")
    for gauge in run.gauges:
        say("  {:12s} memory {:>22s}   descriptors {}".format(*gauge.row))
    say("  all right" if not run.problems else "  WRONG:\n    " + "\n    ".join(run.problems))
    return not run.problems


def in_a_namespace(argv: list[str]) -> int:
    """Run this program again where there is only loopback."""
    inside = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        say("== not run over ucx: its listeners bind everywhere, and no network namespace can be had here")
        return 1
    env = {"ASYNCDP_NETNS": "1", "UCX_TLS": "tcp,self", "UCX_WARN_UNUSED_ENV_VARS": "n", **os.environ}
    command = [sys.executable, "-m", "tests.chaos.ucxx_stress", *argv]
    return subprocess.run([*inside, *command], cwd=ROOT, env=env, check=False).returncode


def main() -> int:
    """Run what the arguments say; 0 where all of it was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each run works")
    parser.add_argument("--seed", type=int, default=1, help="of what the roles draw")
    parser.add_argument("--wire", choices=("lane", "ucx", "both"), default="both", help="how payload travels")
    args = parser.parse_args()
    os.environ["ASYNCDP_SECRET"] = SECRET
    right = True
    if args.wire != "ucx":
        right = stress("lane", args.seconds, args.seed)
    if args.wire != "lane" and not os.environ.get("ASYNCDP_NETNS"):
        told = ["--seconds", str(args.seconds), "--seed", str(args.seed), "--wire", "ucx"]
        return max(int(not right), in_a_namespace(told))
    if args.wire != "lane":
        right = stress("ucx", args.seconds, args.seed) and right
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
