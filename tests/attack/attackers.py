"""Those who attack a slot host, each for some seconds: ``python -m tests.attack.attackers KIND SECONDS FACTS``.

Each tells in one line of JSON how often it tried, and what it won: what it should never have got. ``FACTS`` is what it
knows of the host, as JSON. Nothing here imports torch, nor more of the transport than an earlier release has too.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from asyncdp.transports.ucxx.slots.writer_process import Process, this_machine, this_process
from asyncdp.transports.ucxx.wire import messages as wire
from asyncdp.transports.ucxx.wire.control import Control
from asyncdp.transports.ucxx.wire.handshake import Secret, authenticate
from asyncdp.transports.ucxx.wire.messages import (
    Abort,
    Granted,
    Read,
    Ready,
    Reserve,
    SlotRows,
    Welcome,
    Write,
    pack_frame,
)
from tests.attack.earlier import program

__all__ = ["ATTACKS"]

LOCAL: Final = "127.0.0.1"
#: Another user of the machine; only root can act as one.
NEIGHBOUR: Final = 12345
#: What a release that does not bound them was frozen by.
MOST_REFS: Final = getattr(wire, "MOST_REFS", 500_000)


class Facts(msgspec.Struct):
    """What an attacker knows of the host.

    Attributes:
        epoch, ports, ucx_port: Of the host.
        slot: (slot, generation) of a row of 1 MiB that can be read.
        directory: URL of the directory's server, as the user of another plane.
        library: Version of the functions of the honest plane; "" where it is not known.
        seconds: How long the attack takes, from the first look at the time.
        tried, won: What it has done.
    """

    epoch: int
    ports: list[int]
    ucx_port: int
    slot: tuple[int, int]
    directory: str
    library: str
    seconds: float = 0.0
    tried: int = 0
    won: list[str] = []
    began: float | None = None

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        if self.began is None:
            self.began = time.monotonic()
        return self.seconds - (time.monotonic() - self.began)

    @property
    def goes_on(self) -> bool:
        """Whether there is time left."""
        return self.left_s > 0


@asynccontextmanager
async def entered(facts: Facts, process: Process | None = None) -> AsyncIterator[tuple[Control, Welcome]]:
    """A connection of somebody who knows the secret."""
    control = Control()
    await asyncio.get_running_loop().create_connection(lambda: control, LOCAL, facts.ports[0])
    try:
        shows = [os.urandom(16)] if "client" in inspect.signature(authenticate).parameters else []
        yield control, await authenticate(control, Secret(), this_machine(), process or this_process(), *shows)
    finally:
        control.end()


async def reconnecting(facts: Facts, connections: int, work: Callable[[Control, Welcome], Awaitable[object]]) -> None:
    """Do some work on each of so many connections until time is up; a connection that is lost is made again."""

    async def one() -> None:
        while facts.goes_on:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(facts.left_s), entered(facts) as (control, welcome):
                    while not control.lost:
                        facts.tried += 1
                        await work(control, welcome)
            await asyncio.sleep(0.01)

    await asyncio.gather(*[one() for _ in range(connections)])


def _rows(facts: Facts, count: int, tag: int) -> Read:
    slot, generation = facts.slot
    return Read([("a",)], [SlotRows(slot, generation, 0, 0, 1)] * count, tag, facts.epoch)


# -- strangers


async def _flood(facts: Facts, kind: str) -> None:
    import numpy as np

    from tests.ucxx.strangers import native_of, post, with_all_features

    engine, buffer = with_all_features(), np.zeros(8000, np.uint8)
    post(engine, engine.connect(LOCAL, facts.ucx_port), kind, -1, buffer)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(20):
            while engine.under_way:  # UCX has begun: what follows is the attack
                engine.poll()
                await asyncio.sleep(0.002)
    while facts.goes_on:
        endpoint = engine.connect(LOCAL, facts.ucx_port)
        await asyncio.sleep(0.01)
        with contextlib.suppress(Exception):  # it was cut off: then once more
            while facts.goes_on and native_of(endpoint).alive:
                while engine.under_way < 200:
                    post(engine, endpoint, kind, -1, buffer)
                    facts.tried += 1
                engine.poll()
                await asyncio.sleep(0)
        engine.abandon(endpoint)


async def tagged(facts: Facts) -> None:
    """A2 stranger: tagged UCX messages that nobody awaits, 8 KB each."""
    await _flood(facts, "tag")


async def active(facts: Facts) -> None:
    """A2 stranger: active UCX messages, 8 KB each."""
    await _flood(facts, "am")


async def silent(facts: Facts) -> None:
    """A10 stranger: 4,000 silent connections, at a descriptor limit of 1,024."""
    held: list[asyncio.StreamWriter] = []

    async def connect(port: int) -> None:
        with contextlib.suppress(OSError):
            held.append((await asyncio.open_connection(LOCAL, port))[1])
            facts.tried += 1

    while facts.goes_on:
        await asyncio.gather(*[connect(facts.ports[number % len(facts.ports)]) for number in range(50)])
        if len(held) >= 4000:
            for writer in held[:100]:
                writer.transport.abort()
            del held[:100]
            await asyncio.sleep(0.01)
    for writer in held:
        writer.transport.abort()


async def knocking(facts: Facts) -> None:
    """Stranger: wrong secrets, garbage, frames that announce 268 MB."""

    async def say(data: bytes) -> None:
        reader, writer = await asyncio.open_connection(LOCAL, facts.ports[0])
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                writer.write(data)
                await reader.read()
        writer.transport.abort()

    async def wrong() -> None:
        control = Control()
        await asyncio.get_running_loop().create_connection(lambda: control, LOCAL, facts.ports[0])
        try:
            await authenticate(control, Secret("a guess"), this_machine(), this_process())
            facts.won.append("let in with a wrong secret")
        finally:
            control.end()

    while facts.goes_on:
        facts.tried += 4
        await asyncio.sleep(0.002)
        head = b"ADPW\2\0\0\0"
        for data in (secrets.token_bytes(900), head + b"\0\0\0\1", head + b"\x10\0\0\0" + secrets.token_bytes(16)):
            with contextlib.suppress(OSError):
                await say(data)
        with contextlib.suppress(Exception):
            await wrong()


# -- clients


async def forging(facts: Facts) -> None:
    """A3 client: payloads with the tags that may follow the one it was given."""
    import numpy as np

    from asyncdp.transports.ucxx.wire.engine import Engine

    engine = Engine(devices="lo")
    forged: Any = np.full(1 << 16, 7, np.uint8)
    steps = [number << shift for number in range(1, 5) for shift in (0, 8, 16, 20, 22, 24, 32, 40)]

    async def work(control: Control, welcome: Welcome) -> None:
        endpoint = engine.connect(LOCAL, welcome.ucx_port)
        engine.send_token(endpoint, np.frombuffer(welcome.token, np.uint8).copy())
        await control.send(wire.Tie())
        await control.expect(wire.Tied)
        op_id = secrets.token_hex(8)
        await control.send(Reserve(op_id, ("a",), [1024], 0, 60.0, 0.0, False, facts.epoch))  # noqa: FBT003 - a message
        granted = await control.expect(Granted)
        slot, generation, _, _ = granted.grants[0]
        await control.send(Write(op_id, [(slot, generation, 1024)], facts.epoch))
        tag = (await control.expect(Ready)).tag
        for _ in range(20):
            for step in steps:
                engine.send(endpoint, (tag + step) & (1 << 62) - 1, forged)
            await asyncio.sleep(0.02)
            engine.poll()
        control.end()
        engine.abandon(endpoint)

    await reconnecting(facts, 1, work)


async def naming(facts: Facts) -> None:
    """A4 client: reads of as many refs as a request may have, and of a million."""
    many, million = pack_frame(_rows(facts, MOST_REFS, 0)), pack_frame(_rows(facts, 1_000_000, 0))

    async def work(control: Control, _: Welcome) -> None:
        for frame in (many, many, many, million):
            control._transport.write(frame)
            await control.receive()

    await reconnecting(facts, 2, work)


async def reserving(facts: Facts) -> None:
    """A4 client: space for 2,000 rows of 1,000 fields, and of 240,000 fields."""

    def frame(op_id: str, fields: int) -> bytes:
        names = tuple(f"f{at}" for at in range(fields))
        return pack_frame(Reserve(op_id, names, [1] * 2000, 0, 60.0, 0.0, False, facts.epoch))  # noqa: FBT003 - a message

    many = frame("wide", 240_000)

    async def work(control: Control, _: Welcome) -> None:
        for _again in range(4):
            op_id = secrets.token_hex(8)
            control._transport.write(frame(op_id, 1000))
            await control.receive()
            await control.send(Abort(op_id, idle=True))
            await control.receive()
        control._transport.write(many)
        await control.receive()

    await reconnecting(facts, 2, work)


async def repeating(facts: Facts) -> None:
    """A5 client: small reads of one row of 1 MiB, named 400 times, on four connections that take no payload."""
    frame = pack_frame(_rows(facts, 400, 1))

    async def work(control: Control, _: Welcome) -> None:
        control._transport.write(frame)
        await control.receive()
        await asyncio.sleep(0.5)
        control.end()

    await reconnecting(facts, 4, work)


async def pipelining(facts: Facts) -> None:
    """A6 client: 60 connections that send on without waiting for replies."""
    frame = pack_frame(_rows(facts, 64, 0)) * 64

    async def work(control: Control, _: Welcome) -> None:
        control._transport.write(frame)
        await asyncio.sleep(0.05)

    await reconnecting(facts, 60, work)


async def posing(facts: Facts) -> None:
    """A7 client: space on the lane in the name of a process that lives on, for seven days."""
    with subprocess.Popen(["sleep", "60"]) as other:  # noqa: ASYNC220 - it is not waited for
        stat = Path(f"/proc/{other.pid}/stat").read_text()  # noqa: ASYNC240 - no disk is read
        process = Process(other.pid, int(stat.rpartition(")")[2].split()[19]))
        while facts.goes_on:
            with contextlib.suppress(Exception):
                async with entered(facts, process) as (control, _):
                    facts.tried += 1
                    op_id = secrets.token_hex(8)
                    ask = Reserve(op_id, ("a",), [1 << 16], 0, 7 * 86400.0, 0.0, True, facts.epoch)  # noqa: FBT003 - a message
                    await control.send(ask)
                    if (await control.expect(Granted)).lane:
                        facts.won.append("space in the name of another process")
                        break
            await asyncio.sleep(0.01)
        other.kill()


async def hoarding(facts: Facts) -> None:
    """A7 client: reserves all that it gets, put by put of 1 MiB, and writes nothing."""

    async def work(control: Control, _: Welcome) -> None:
        ask = Reserve(secrets.token_hex(8), ("a",), [1 << 20], 0, 7 * 86400.0, 0.0, False, facts.epoch)  # noqa: FBT003 - a message
        await control.send(ask)
        if not isinstance(await control.receive(), Granted):
            await asyncio.sleep(0.1)

    await reconnecting(facts, 1, work)


async def aborting(facts: Facts) -> None:
    """Client: gives up and writes the puts of another client, whose op_ids and slots it guesses."""

    async def work(control: Control, _: Welcome) -> None:
        for number in range(facts.tried, facts.tried + 50):
            op_id = f"honest-{number % 2000}"
            await control.send(Abort(op_id, idle=True))
            await control.receive()
            await control.send(Write(op_id, [(number % 64, 1 + number % 8, 8)], facts.epoch, None, b"\7" * 8))
            await control.receive()
        facts.tried += 99
        await asyncio.sleep(0.005)

    await reconnecting(facts, 1, work)


# -- neighbours, other planes, values


def _as_neighbour(work: Callable[[], object]) -> None:
    """Do something as another user where that can be had, else as this one."""
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            with contextlib.suppress(OSError):
                os.setgroups([])
                os.setgid(NEIGHBOUR)
                os.setuid(NEIGHBOUR)
            os.umask(0)
            work()
        os._exit(0)
    os.waitpid(child, 0)


async def _started(*arguments: str, ready: str) -> bool:
    """Whether a process of the plane says that it serves."""
    command = program(*arguments)
    pipe = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(120):
            while line := await process.stdout.readline():
                if ready in line.decode():
                    return True
    finally:
        if process.returncode is None:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(10):
                    await process.wait()
            if process.returncode is None:
                process.kill()
        await process.wait()
    return False


async def squatting(facts: Facts) -> None:
    """A1 neighbour: makes the segment of a named host first, as an arena of mode 666."""
    from asyncdp.transports.ucxx.slots.arena import Arena, arena_name

    host_id = f"squat-{os.getpid()}"
    segment = Path("/dev/shm") / arena_name(host_id, "attack")
    settings = {"host_id": host_id, "plane": "attack", "arena_bytes": 1 << 20, "ucx": False, "keep_arena": False}

    def squat() -> None:
        Arena.create(segment.name, host_id, epoch=1, data_bytes=1 << 20)
        segment.chmod(0o666)

    try:
        _as_neighbour(squat)
        assert segment.exists()
        facts.tried += 1
        told = json.dumps(settings)
        if await _started("asyncdp.transports.ucxx.host.main", "--settings", told, ready='"ready"'):
            facts.won.append("a host serves from a segment that others may write")
    finally:
        segment.unlink(missing_ok=True)


async def planting(facts: Facts) -> None:
    """A9 neighbour: folder, password file and config of a plane are made first, writable for all."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o777)  # noqa: PTH101 - no disk is waited for
        theirs = Path(made, "theirs")

        def plant() -> None:
            theirs.mkdir(0o777)
            (theirs / "password").write_text("known to both")

        _as_neighbour(plant)
        small = ["--arena", "1MiB", "--no-ucx"]
        for option in (["--folder", str(theirs)], ["--config", str(theirs / "plane.json")]):
            if facts.tried and not facts.goes_on:
                break
            facts.tried += 1
            if await _started("asyncdp.cli.main", "serve", *option, *small, ready="ready"):
                facts.won.append(f"a plane is served with {option[0]} in a folder of another user")


async def reaching(facts: Facts) -> None:
    """A8 other plane: replaces functions, runs scripts, reads and writes keys on the server that both share."""
    from redis.asyncio import Redis
    from redis.exceptions import RedisError

    code = "#!lua name={}\nredis.register_function('f_{}', function() return 1 end)"
    attacks: list[tuple[str, ...]] = [
        ("FUNCTION", "LOAD", "REPLACE", code.format(f"asyncdp_{facts.library}", secrets.token_hex(4))),
        ("FUNCTION", "LOAD", code.format("new", secrets.token_hex(4))),
        ("FUNCTION", "FLUSH"),
        ("SCRIPT", "FLUSH"),
        ("SCAN", "0"),
        ("KEYS", "*"),
        ("SELECT", "1"),
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
        ("CLIENT", "KILL", "TYPE", "normal"),
        ("SHUTDOWN", "NOSAVE"),
        ("SET", "attack:plane", "mine"),
        ("GET", "attack:secret"),
        ("FCALL", f"locate_{facts.library}", "1", "attack:{p}:", "", "0", "", ""),
        ("PUBLISH", "attack:{p}:n", ""),
        ("EVAL", "for i = 1, 3e8 do end", "0"),
    ]
    client = Redis.from_url(facts.directory, socket_timeout=10.0)
    while facts.goes_on:
        for attack in attacks:
            facts.tried += 1
            try:
                await client.execute_command(*attack)
            except RedisError:
                continue
            if " ".join(attack[:2]) not in facts.won:
                facts.won.append(" ".join(attack[:2])[:60])
        await asyncio.sleep(0.02)
    await client.aclose()


async def costing(facts: Facts) -> None:
    """Client: values that cost their reader much: one hash, deep nesting, impossible code points."""
    import msgpack
    import numpy as np

    from asyncdp.errors import CorruptPayload
    from asyncdp.transports.ucxx.payload import objects

    codec = objects.MsgpackCodec()
    good = codec.dumps(np.array(["\U0010ffff"], "<U1"))
    # Packed one by one: to make the set or the dict would cost the attacker what it is to cost the reader.
    alike = [codec.dumps(number * ((1 << 61) - 1)) for number in range(1, 20_000)]
    count = len(alike).to_bytes(4, "big")
    values = {
        "a set of one hash": msgpack.packb(msgpack.ExtType(objects._SET, b"\xdd" + count + b"".join(alike))),
        "keys of one hash": b"\xdf" + count + b"\xc0".join([*alike, b""]),
        "100,000 lists within each other": b"\x91" * 100_000 + b"\xc0",
        "a code point that does not exist": good.replace(
            (0x10FFFF).to_bytes(4, "little"), (0x110000).to_bytes(4, "little")
        ),
    }
    while facts.goes_on:
        for name, data in values.items():
            facts.tried += 1
            began = time.process_time()
            try:
                codec.loads(data)
            except CorruptPayload:
                pass
            except BaseException as err:  # noqa: BLE001 - what a reader sees who awaits a value or CorruptPayload
                facts.won.append(f"{name}: {type(err).__name__}")
            if time.process_time() - began > 1.0:
                facts.won.append(f"{name}: {time.process_time() - began:.1f} s")
        facts.won = sorted(set(facts.won))
        await asyncio.sleep(0.05)


ATTACKS: Final = {
    attack.__name__: attack
    for attack in (
        squatting, tagged, active, forging, naming, reserving, repeating, pipelining, posing, hoarding, reaching,
        planting, silent, knocking, aborting, costing,
    )
}  # fmt: skip


def main(kind: str, seconds: float, told: str) -> None:
    """Attack, and say what came of it."""
    facts = msgspec.json.decode(told, type=Facts)
    facts.seconds = seconds
    asyncio.run(ATTACKS[kind](facts))
    print(json.dumps({"tried": facts.tried, "won": facts.won}), flush=True)  # noqa: T201 - to who started it
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3])
