"""Attacks a slot host in a process of its own, and prints what an honest client and the host felt of it.

    python -m tests.attack [KIND ...] [--seconds 5] [--json] [--against PATH]

Each attack has a host of its own, registered in a directory (Valkey), and runs beside a client that reads, puts and
connects all the time. All of it is in a network namespace with only loopback; attackers are nicer than the others by
``--nice`` 10, for in truth they have processors of their own. The exit code is 1 where a bound is broken: the client's
p99 is at most five times its quiet one (one below 10 ms counts as 10 ms), none of its calls fails, the host's memory
is back within 10 s (64 MiB may stay), its directory knows it throughout, and the attacker won nothing.

``--against``: another checkout's slot host, client and directory under the attacks of this one, to compare.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from asyncdp.transports.ucxx.directory import Directory, DirectorySettings, EmbeddedServer
from tests.attack.attackers import ATTACKS, Facts
from tests.attack.earlier import program
from tests.attack.honest import Honest, Took
from tests.attack.host_watch import HostWatch, Seen
from tests.ucxx.clients import LOCAL, client
from tests.ucxx.hosts import Spawned

#: Of a client's p99: so many times the quiet one; a quiet one below this many milliseconds counts as so many.
MOST_SLOWER: Final = 5.0
FLOOR_MS: Final = 10.0
#: Memory that may stay, and how long the rest may take to go.
KEPT_MIB: Final = 64
BACK_S: Final = 10.0
QUIET_S: Final = 3.0
DESCRIPTORS: Final = 1024
VERBS: Final = ("read", "put", "connect")
NAMESPACE: Final = ["unshare", "-n" if os.geteuid() == 0 else "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
ROOT: Final = Path(__file__).parents[2]
#: Gets what an attacker knows; returns how often it tried, and what it won.
Attacker = Callable[[Facts], Awaitable[tuple[int, list[str]]]]


class Outcome(msgspec.Struct):
    """What came of one attack.

    Attributes:
        kind, what: The attack.
        tried, won: By the attacker.
        quiet, loud: The honest client before it and under it, milliseconds (p50, p99) by verb.
        again, failed: Calls of the honest client under attack that had to be tried again, and those that failed.
        memory_mib: Of the host: before, at the most, and in the end.
        back_s: After how many seconds its memory was back; None: it was not within 10 s.
        descriptors: Of the host: before, and at the most.
        lines: Of its log.
        silent_s: Longest time without a heartbeat; one is due each second.
        unregistered: How often the directory did not know the host, of two looks a second.
        broken: Bounds that were broken.
    """

    kind: str
    what: str
    tried: int
    won: list[str]
    quiet: dict[str, tuple[float, float]]
    loud: dict[str, tuple[float, float]]
    again: int
    failed: list[str]
    memory_mib: tuple[int, int, int]
    back_s: float | None
    descriptors: tuple[int, int]
    lines: int
    silent_s: float
    unregistered: int
    broken: list[str]


@contextmanager
def _host(url: str, log: IO[bytes]) -> Iterator[Spawned]:
    name = f"h-{uuid.uuid4().hex[:8]}"
    settings = {
        "host_id": name, "plane": "attack", "ports": 2, "arena_bytes": 64 << 20, "max_slot_bytes": 16 << 20,
        "keep_arena": False, "devices": "lo",
    }  # fmt: skip
    few = ["sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "sh"]
    command = [*few, *program("asyncdp.transports.ucxx.host.main", "--watch-stdin", "--namespace", "attack")]
    env = {**os.environ, "ASYNCDP_DIRECTORY": url, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--settings", json.dumps(settings)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=log, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        told: dict[str, Any] = {}
        while not told.get("ready"):
            line = process.stdout.readline()
            if not line:
                code = process.wait()
                log.seek(0)
                raise RuntimeError(f"the host ended with {code}: {log.read().decode(errors='replace')[-1000:]}")
            with contextlib.suppress(json.JSONDecodeError):
                told = json.loads(line)
        yield Spawned(process, told)
    finally:
        process.communicate() if process.poll() is None else None
        process.kill()
        process.wait()


@asynccontextmanager
async def _directory() -> AsyncIterator[tuple[EmbeddedServer, Directory, str, str]]:
    """A server, a client of the plane, the URL that a user of another plane on it has, and a library's version."""
    server = EmbeddedServer()
    await server.start()
    directory = Directory(server.url, settings=DirectorySettings(namespace="attack"))
    try:
        version = ""
        try:
            from asyncdp.transports.ucxx.directory import lua as library
            from asyncdp.transports.ucxx.directory.server import acl

            rules, version = acl.acl_rules("other"), library.version("attack")
            await acl.install_functions(server.url, "other")
        except ImportError:  # a release before there was one: what its documentation told users to set
            rules = ["~other:*", "&other:*", "+@all", "-@admin", "-@dangerous"]
        await directory._link.command("ACL", "SETUSER", "other", "on", ">other", *rules)
        yield server, directory, f"unix://other:other@{server.folder / 'valkey.sock'}", version
    finally:
        await directory.close()
        await server.stop()


def _figures(took: Took) -> dict[str, tuple[float, float]]:
    return {verb: (took.percentile(verb, 50), took.percentile(verb, 99)) for verb in VERBS}


async def _attacker(kind: str, seconds: float, nice: int, facts: Facts) -> tuple[int, list[str]]:
    """Run one in a process of its own; returns how often it tried, and what it won."""
    told = msgspec.json.encode(facts).decode()
    command = ["nice", "-n", str(nice), *program("tests.attack.attackers", kind, str(seconds), told)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, env=env)
    out, _ = await process.communicate()
    if process.returncode or not out:
        return 0, [f"the attacker itself ended with {process.returncode}: the run shows nothing"]
    said: dict[str, Any] = json.loads(out.splitlines()[-1])
    won: list[str] = said["won"] if said["tried"] else ["it came to nothing: the run shows nothing"]
    return said["tried"], won


async def _memory_back(watch: HostWatch, most_mib: int) -> float | None:
    """Seconds until the host's memory is back; None: it is not within 10 s."""
    began = time.monotonic()
    while time.monotonic() - began < BACK_S:
        if watch.memory_mib() <= most_mib:
            return time.monotonic() - began
        await asyncio.sleep(0.2)
    return None


def _broken(outcome: Outcome) -> Iterator[str]:
    """Name the bounds that were broken."""
    for verb in VERBS:
        quiet, loud = outcome.quiet[verb][1], outcome.loud[verb][1]
        if loud > MOST_SLOWER * max(quiet, FLOOR_MS):
            yield f"p99 of {verb} x {loud / quiet:.1f}"
    if outcome.failed:
        yield f"{len(outcome.failed)} calls failed, such as {outcome.failed[0]}"
    if outcome.back_s is None:
        yield f"memory stays {outcome.memory_mib[2] - outcome.memory_mib[0]} MiB higher"
    if outcome.unregistered:
        yield f"not registered at {outcome.unregistered} looks"
    yield from outcome.won


async def attack(kind: str, seconds: float, nice: int) -> Outcome:
    """One attack on a host of its own."""
    with tempfile.TemporaryFile() as log:
        async with _directory() as (server, directory, other, version):
            with _host(server.url, log) as host:
                async with client() as pool:
                    work = partial(_attacker, kind, seconds, nice)
                    outcome = await _measured(kind, work, host, Honest(pool, host.ref), directory, (other, version))
        log.seek(0)
        outcome.lines = log.read().count(b"\n")
    outcome.broken = list(_broken(outcome))
    return outcome


async def _measured(
    kind: str, work: Attacker, host: Spawned, honest: Honest, directory: Directory, other: tuple[str, str]
) -> Outcome:
    slot = await honest.begin()
    async with honest._pool.use(LOCAL, host.ref.ports[0]) as connection:
        ucx_port = connection.welcome.ucx_port
    facts = Facts(host.ref.epoch, list(host.ref.ports), ucx_port, slot, *other)
    watch = HostWatch(host.process.pid, host.ref.id, directory)
    await honest.run(0.5)
    quiet = await honest.run(QUIET_S)
    watch.begin()
    before = Seen(watch.memory_mib(), watch.descriptors())
    watching = asyncio.ensure_future(watch.run())
    attacker = asyncio.ensure_future(work(facts))
    loud = Took()
    try:
        while not attacker.done():
            took = await honest.run(0.25)
            for verb, ms in took.ms.items():
                loud.ms.setdefault(verb, []).extend(ms)
            loud.again += took.again
            loud.failed += took.failed
        tried, won = await attacker
        back_s = await _memory_back(watch, before.memory_mib + KEPT_MIB)
        loud.failed += (await honest.run(0.5)).failed
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    if host.process.poll() is not None:
        won.append(f"the host ended with {host.process.returncode}")
    seen = watch.seen
    return Outcome(
        kind, (ATTACKS[kind].__doc__ or "").rstrip("."), tried, won, _figures(quiet), _figures(loud), loud.again,
        loud.failed, (before.memory_mib, seen.memory_mib, watch.memory_mib()), back_s,
        (before.descriptors, seen.descriptors), 0, seen.silent_s, seen.unregistered, [],
    )  # fmt: skip


def _beside(outcome: Outcome, verb: str) -> str:
    (middle, worst), (loud_middle, loud_worst) = outcome.quiet[verb], outcome.loud[verb]
    ratio = f"x {loud_worst / worst:.1f}" if worst else "-"
    return f"{middle:.1f} / {worst:.1f}\n{loud_middle:.1f} / {loud_worst:.1f}\n{ratio}"


def show(outcomes: list[Outcome], title: str) -> None:
    """Print the table."""
    table = Table(title=title, title_justify="left", show_lines=True)
    heads = [f"{verb}, p50 / p99 ms:\nquiet, attacked, ratio" for verb in VERBS]
    for head in (
        "attack", "tried", *heads, "tried again,\nfailed", "host memory MiB:\nbefore, most, end;\nback after",
        "descriptors:\nbefore, most", "log\nlines", "longest silence,\nunregistered", "verdict",
    ):  # fmt: skip
        table.add_column(head, overflow="fold")
    for each in outcomes:
        back = "not back" if each.back_s is None else f"{each.back_s:.1f} s"
        table.add_row(
            f"[bold]{each.kind}[/]\n{each.what}", str(each.tried), *[_beside(each, verb) for verb in VERBS],
            f"{each.again}, {len(each.failed)}", f"{' '.join(map(str, each.memory_mib))}\n{back}",
            f"{each.descriptors[0]} {each.descriptors[1]}", str(each.lines),
            f"{each.silent_s:.1f} s, {each.unregistered}",
            "[green]held[/]" if not each.broken else "[red]" + "\n".join(each.broken).replace("[", "\\["),
        )  # fmt: skip
    Console(width=230).print(table)


def _again(args: argparse.Namespace) -> int:
    """Run this in a namespace of its own, and with another checkout where that is to be attacked."""
    if subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode:
        print("no network namespace can be had; UCX listeners would bind to all addresses: --here does it anyway")  # noqa: T201
        return 1
    paths = [str(ROOT)]
    if args.against:
        paths.insert(0, str(args.against.resolve()))  # first of all: its own asyncdp, and its own tests' helpers
    env = {"UCX_TLS": "tcp,self", "UCX_WARN_UNUSED_ENV_VARS": "n", "OMP_NUM_THREADS": "1", **os.environ}
    env |= {"PYTHONPATH": os.pathsep.join(paths)}
    options = ["--seconds", str(args.seconds), "--nice", str(args.nice), *(["--json"] if args.json else [])]
    command = [*NAMESPACE, *program("tests.attack", *args.kinds, "--here", *options)]
    return subprocess.run(command, env=env, cwd=paths[0], check=False).returncode


def main() -> int:
    """Run them all, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"which attacks: {', '.join(ATTACKS)}; default: all")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each attack takes (default: 5)")
    parser.add_argument("--nice", type=int, default=10, help="how nice attackers are (default: 10)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--against", type=Path, metavar="PATH", help="attack what another checkout has")
    parser.add_argument("--here", action="store_true", help="not in a namespace: UCX listeners bind everywhere")
    args = parser.parse_args()
    unknown = [kind for kind in args.kinds if kind not in ATTACKS]
    if unknown:
        parser.error(f"there is no attack {unknown[0]!r}; there are {', '.join(ATTACKS)}")
    if not args.here:
        return _again(args)
    os.environ["ASYNCDP_SECRET"] = "a secret for tests"  # as the helpers of the tests have it
    outcomes = []
    for kind in args.kinds or ATTACKS:
        outcome = asyncio.run(attack(kind, args.seconds, args.nice))
        outcomes.append(outcome)
        print(f"{kind}: {', '.join(outcome.broken) or 'held'}", file=sys.stderr, flush=True)  # noqa: T201
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(outcomes)).decode())  # noqa: T201
    else:
        import asyncdp

        show(outcomes, f"Attacks of {args.seconds:g} s on slot hosts of {Path(asyncdp.__file__).parents[1]}")
    return int(any(outcome.broken for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
